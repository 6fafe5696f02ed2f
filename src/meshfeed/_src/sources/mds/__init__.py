"""Data sets of Mosaic Streaming: ``source.py`` finds and reads shards, ``encodings.py`` decodes columns."""
