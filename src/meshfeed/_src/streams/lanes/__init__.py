"""Streams that are divided into lanes. Read first: ``lane.py``."""
