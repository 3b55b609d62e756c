"""Experts of a mixture: see README.md."""
