"""One check a file: each takes a `Subject` and yields rows."""
