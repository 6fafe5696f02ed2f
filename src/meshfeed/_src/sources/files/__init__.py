"""Paths and globs, streams divided into lanes by file, and the cache of remote shards."""
