"""``meshfeed demo``: trains on several hosts, kills them, resumes on others, compares. Uses only the public API."""
