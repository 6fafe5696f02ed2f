"""``meshfeed demo``: trains on several hosts, kills them, resumes on others, compares. Needs only the public API."""
