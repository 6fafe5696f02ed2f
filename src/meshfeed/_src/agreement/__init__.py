"""What hosts agree on through the key-value store: settings, how far all of them can go, and failures.

May import: everything above that is below feed: base to streams and sources. Read first: ``windows.py``.
"""
