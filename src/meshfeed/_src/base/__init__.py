"""Shared by all packages: errors, types, settings, processes, threads, retries, aligned memory, pytrees, the job's store.

Imports no other package of meshfeed. Read first: ``errors.py``, then ``coordination.py``.
"""
