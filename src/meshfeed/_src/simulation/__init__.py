"""Simulates what feeds download through a cache, and how long they wait, on the real order and the real cache policy.

May import: agreement, base, order, pictures, reading, sources, streams. Read first: ``simulate.py``, then ``hosts.py``.
"""
