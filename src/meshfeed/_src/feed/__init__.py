"""The recipe: ``MultiHostDataLoadIterator`` joins source, order, plan, reading, agreement and assembly.

May import: every room above. Read first: ``iterator.py``, then ``pipeline.py``.
"""
