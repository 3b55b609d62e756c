"""Rotary position embedding: see README.md."""
