"""MaxText's data iterators, implemented with meshfeed. Read first: ``loader.py``."""
