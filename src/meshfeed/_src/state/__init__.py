"""The state of a feed as a JSON value, its fingerprint, and the files in which it is stored.

May import: base. Read first: ``state.py``.
"""
