"""Queries and latents before they are used: see README.md."""
