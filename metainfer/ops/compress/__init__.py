"""Compressed cache entries: see README.md."""
