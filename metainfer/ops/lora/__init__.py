"""Low-rank adapters: see README.md."""
