"""Streams of batches that each host makes itself. Read first: ``stream.py``."""
