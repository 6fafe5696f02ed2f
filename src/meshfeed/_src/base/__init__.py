"""What every room needs: errors, types, settings, threads, retries, aligned memory, and the job's key-value store.

Imports no other room. Read first: ``errors.py``, then ``coordination.py``.
"""
