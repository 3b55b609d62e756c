"""A vendor package that tests install; see README.md."""
