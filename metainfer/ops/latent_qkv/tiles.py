"""Tile sizes of the latent kernel, read by the kernel's call and the audit. No torch."""

from __future__ import annotations

WARPS = 4

_TILE = 2048


def heads_per_program(width: int, heads: int) -> int:
    """Heads of one token that a program norms and turns: a power of two."""
    lanes = 1 << (width - 1).bit_length()
    most = 1 << (heads - 1).bit_length()
    return max(1, min(most, _TILE // lanes))
