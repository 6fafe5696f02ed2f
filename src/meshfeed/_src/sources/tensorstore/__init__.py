"""TensorStore arrays as records. Read first: ``source.py``."""
