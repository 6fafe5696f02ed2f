"""The state of a feed as a JSON value, its fingerprint, and the files that it is stored in.

May import: base. Read first: ``state.py``.
"""
