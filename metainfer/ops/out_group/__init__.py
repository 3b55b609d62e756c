"""Grouped output projection: see README.md."""
