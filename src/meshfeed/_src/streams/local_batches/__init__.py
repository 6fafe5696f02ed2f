"""Streams of batches that each host makes itself. Start with ``stream.py``."""
