"""Tile sizes of the compressor's kernel, read by the kernel's call and the audit. No torch."""

from __future__ import annotations

MAX_WIDTH = 1024
"""Widest entry: a program holds some raw rows of it whole."""

_TILE = 8192


def rows_per_step(slots: int, width: int) -> int:
    """Raw rows of a window that are pooled at a time: a power of two."""
    lanes = 1 << (width - 1).bit_length()
    most = 1 << (slots - 1).bit_length()
    return max(1, min(most, _TILE // lanes))


def warps_for(slots: int, width: int) -> int:
    """A thread has up to 32 values and as many gates."""
    lanes = 1 << (width - 1).bit_length()
    return 8 if rows_per_step(slots, width) * lanes > 2048 else 4
