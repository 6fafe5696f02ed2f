"""``meshfeed demo``: trains on several hosts, kills them, resumes on others, and compares. Uses the public API and child processes only."""
