"""Attention over a window and chosen compressed entries: see README.md."""
