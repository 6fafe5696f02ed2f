"""ArrayRecord files. Read first: ``source.py``; ``_riegeli.c`` is the C extension that reads whole batches."""
