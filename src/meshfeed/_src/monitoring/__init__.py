"""Exporters of a feed's figures: a log of JSON lines, Prometheus, TensorBoard.

May import: base, feed, pictures. Read first: ``exporters.py``; ``stored_log.py`` has logs at URLs.
"""
