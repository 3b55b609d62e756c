"""Attention and the indexer over a cache that is dealt over ranks (README.md)."""
