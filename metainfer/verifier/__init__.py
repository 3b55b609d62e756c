"""Proof that a plan computes what its references compute, on this machine. See README.md."""
