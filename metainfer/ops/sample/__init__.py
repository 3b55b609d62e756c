"""Token sampling: see README.md."""
