"""Test tools for feeds: the conformance check, and real multi-host jobs on one machine. Read first: ``resumable.py``."""
