"""Tile sizes of the compressor's kernel, read by the kernel's call and the audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WIDTH = 1024
"""Widest entry: a program holds it whole."""

_TILE = 8192
_PROGRAMS = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """`slice`: channels that are pooled together, `rows`: raw rows at a time; powers of two. The
    same for any number of tokens: sums are rounded in the order that it gives."""

    slice: int
    rows: int
    warps: int


def tile_for(slots: int, lanes: int) -> Tile:
    """For windows of `slots` raw rows of `lanes` channels. Short windows are pooled whole; long
    ones in slices of 64 bytes a row. A thread has 16 values, up to 32, and as many gates."""
    most = 1 << (slots - 1).bit_length()
    part = lanes if slots <= 32 else min(lanes, 16)
    rows = max(1, min(most, _TILE // part))
    # Slices leave registers for more programs beside each other.
    return Tile(part, rows, 8 if part == lanes and rows * part > 2048 else 4)


def each_for(rows: int, slices: int) -> int:
    """Slices that one program of a token pools: few where tokens are few, more where programs would
    mostly be of tokens that close no window."""
    each = 1
    while each < slices and rows * slices // each > max(_PROGRAMS, 2 * rows):
        each *= 2
    return each
