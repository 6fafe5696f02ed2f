"""Files of a source: paths and what stores report, manifests, reads of local and remote files, and the cache of shards.

Read first: ``paths.py``, ``lookup.py`` (what is in each file), then ``shards.py`` and ``shard_cache.py``.
"""
