"""Paths and globs, streams cut along files, and the cache of remote shards."""
