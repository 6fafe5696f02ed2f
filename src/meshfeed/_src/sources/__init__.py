"""Sources of records: one folder or file per family of libraries or formats.

May import: base, order, plan, state, reading, arrays; not streams. Read first: ``memory.py``, then the family you need.
"""
