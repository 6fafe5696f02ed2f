"""Plans which rows and columns each host reads, and which device holds them. Pure; touches no data.

May import: base. Read first: ``plan.py``.
"""
