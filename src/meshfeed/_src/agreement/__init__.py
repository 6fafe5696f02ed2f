"""What hosts agree on through the key-value store: settings, how far all of them can read, and failures.

May import base to streams and sources: every package below feed. Start with ``windows.py``.
"""
