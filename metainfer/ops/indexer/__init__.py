"""Choice of cache entries per query: see README.md."""
