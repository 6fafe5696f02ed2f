"""``meshfeed demo``: trains on several hosts, kills them, resumes elsewhere, and compares. Uses the public API alone."""
