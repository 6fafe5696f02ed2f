"""Worker processes that read and decode. Start with ``pool.py``."""
