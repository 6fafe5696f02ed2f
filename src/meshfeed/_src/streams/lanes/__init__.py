"""Streams divided into lanes. Start with ``lane.py``."""
