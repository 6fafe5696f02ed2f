"""The feed: ``Feed`` combines source, order, plan, reading, agreement and assembly.

May import: agreement, arrays, base, pictures, plan, reading, sources, state, streams. Read first: ``iterator.py``,
then ``pipeline.py`` and ``generations.py``; for feeds that continue on another sharding, ``resharding.py``.
"""
