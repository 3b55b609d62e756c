"""Masks of the torch form of paged attention, in bytes. No torch."""

WORKSPACE = 64 << 20
"""Bytes of masks at once. A chunk of 4,096 queries at 40,960 tokens would take 0.8 GB of them."""


def mask_bytes(keys: int, element: int) -> int:
    """Of one query: what it sees, and as added to scores, twice where it is padded."""
    return keys * (1 + 2 * element)
