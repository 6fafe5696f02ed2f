"""The three kinds of stream behind one protocol: random access, lanes, and host-local batches.

May import: base, order, plan, state, reading; not sources. Read first: ``protocol.py``, then ``random_access.py``.
"""
