"""Shared by all packages: errors, types, settings, processes, threads, retries, memory, pytrees, the job's store, URLs.

Imports no other package of meshfeed. Read first: ``errors.py``, then ``coordination.py``.
"""
