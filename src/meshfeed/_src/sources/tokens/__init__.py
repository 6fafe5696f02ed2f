"""Flat files of tokens: ``source.py``, ``formats.py``, and ``files.py``, which reads them with the extension ``_reads.c``."""
