"""Flat files of tokens: ``source.py``, and ``_reads.c``, the C extension that reads batches."""
