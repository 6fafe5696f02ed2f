"""Mixtures of sources. Read first: ``source.py``."""
