"""Shared by all packages: errors, types, settings, threads, retries, aligned memory, and the job's key-value store.

Imports no other package of meshfeed. Read first: ``errors.py``, then ``coordination.py``.
"""
