"""From record ids to a host batch: reads, retries, decoding, stacking and padding, here or in worker processes.

May import: base, order, plan, state. Read first: ``records.py``, then ``host_batch.py``.
"""
