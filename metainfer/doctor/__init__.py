"""Findings about a machine, graded, with remedies."""
