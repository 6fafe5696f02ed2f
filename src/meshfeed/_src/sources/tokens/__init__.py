"""Flat files of tokens. Read first: ``source.py``; ``files.py`` has the formats and reads batches, with ``_reads.c``."""
