"""The command line. Read first: ``main.py``."""
