"""A feed that runs on the CPU hosts attached to the accelerators, under one controller. Read first: ``feed.py``."""
