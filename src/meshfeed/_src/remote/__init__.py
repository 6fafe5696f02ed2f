"""A feed on the CPU hosts beside the accelerators, under one controller. Read first: ``feed.py``."""
