"""Implementations with one fault each; `faults.py`."""
