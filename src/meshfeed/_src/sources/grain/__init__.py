"""Grain datasets, as random access or cut into lanes. Read first: ``source.py``."""
