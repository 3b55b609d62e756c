"""Tile sizes of the norm kernels, read by the kernel, its declaration and the audit. No torch."""

from __future__ import annotations

MAX_WIDTH = 16384
"""Widest row: a program holds it whole."""

_TILE = 1024


def rows_per_program(width: int) -> int:
    """Rows of one program: narrow rows (one head) share it."""
    block = 1 << max(width - 1, 0).bit_length()
    return max(1, _TILE // block)


def warps_for(elements: int) -> int:
    """Eight elements or more per thread."""
    return min(16, max(4, elements // 256)) if elements > _TILE else 4
