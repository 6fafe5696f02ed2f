"""Which rows and columns each host reads, and which device holds them. Pure; no data is touched.

May import: base. Read first: ``plan.py``.
"""
