"""The feed: ``MultiHostDataLoadIterator`` combines source, order, plan, reading, agreement and assembly.

May import every package listed before feed. Start with ``iterator.py``, then ``pipeline.py``.
"""
