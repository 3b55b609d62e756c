"""DeepSeek-V4-Flash: see README.md."""
