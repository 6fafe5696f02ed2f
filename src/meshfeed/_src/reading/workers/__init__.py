"""Worker processes that read and decode. Read first: ``pool.py``."""
