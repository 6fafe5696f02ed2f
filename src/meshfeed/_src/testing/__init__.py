"""Tools for tests of feeds: the conformance check, and real multi-host jobs on one machine. Read first: ``resumable.py``."""
