"""RMS norm: see README.md."""
