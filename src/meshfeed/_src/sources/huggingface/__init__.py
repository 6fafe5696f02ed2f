"""Hugging Face datasets as random-access sources or as lanes. Read first: ``table.py``, then ``stream.py``."""
