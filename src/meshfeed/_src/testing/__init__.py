"""Test tools for feeds: a conformance check, and real multi-host jobs on one machine. Read first: ``resumable.py``."""
