"""What every form of the parts agrees on, and no form computes."""

EMPTY = -1e30
"""The logarithm of a sum of nothing: finite, so that parts without keys weigh 0 and never NaN."""
