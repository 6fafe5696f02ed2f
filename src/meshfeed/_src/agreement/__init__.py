"""What hosts agree on through the key-value store: settings, how far all of them can read, and failures.

May import: base, reading, state, streams. Read first: ``messages.py``, then ``windows.py``; for a rule on
batches, ``window_report.py``; for hosts that continue without others, ``meeting.py``.
"""
