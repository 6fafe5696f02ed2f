"""MaxText's iterators over meshfeed. Read first: ``loader.py``."""
