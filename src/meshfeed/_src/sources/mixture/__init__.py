"""Mixtures by weight: ``mixture.py`` has the function, the other files its two kinds of source and their lanes."""
