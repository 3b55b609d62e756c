"""Gated activations: see README.md."""
