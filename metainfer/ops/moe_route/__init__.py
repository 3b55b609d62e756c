"""Choice of experts and their weights: see README.md."""
