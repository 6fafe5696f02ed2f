"""Flat files of tokens. Read first: ``source.py``; ``files.py`` holds the formats, ``reads.py`` how batches are read."""
