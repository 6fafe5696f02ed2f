"""Turns record ids into host batches: reads, retries, decoding, stacking and padding, on threads or worker processes.

May import: base, order. Read first: ``records.py``, then ``stacking.py``.
"""
