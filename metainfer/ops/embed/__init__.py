"""Token embedding: see README.md."""
