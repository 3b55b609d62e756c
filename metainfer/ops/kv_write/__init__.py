"""Cache write: see README.md."""
