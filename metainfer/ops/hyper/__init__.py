"""Manifold-constrained hyper-connections: see README.md."""
