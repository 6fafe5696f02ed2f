"""Grain datasets as random-access sources or as lanes. Read first: ``datasets.py``, then ``lanes.py``."""
