"""ArrayRecord files. Read first: ``source.py``; ``_riegeli.c`` is the extension that reads whole batches."""
