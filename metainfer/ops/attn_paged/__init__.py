"""Attention over a paged cache: see README.md."""
