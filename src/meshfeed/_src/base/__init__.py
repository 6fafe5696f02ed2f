"""Shared by all packages: errors, types, settings, threads, retries, aligned memory, and the job's key-value store.

Imports no other package of meshfeed. Start with ``errors.py``, then ``coordination.py``.
"""
