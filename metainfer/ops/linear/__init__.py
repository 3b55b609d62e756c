"""Linear layers: see README.md."""
