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
    ones in slices of 128 bytes a row, which leave registers for more programs beside each other. A
    thread has 16 values, up to 32, and as many gates."""
    if slots > 32 and lanes > 32:
        return Tile(32, 64, 4)
    rows = max(1, min(1 << (slots - 1).bit_length(), _TILE // lanes))
    return Tile(lanes, rows, 8 if rows * lanes > 2048 else 4)


def each_for(rows: int, slices: int) -> int:
    """Slices that one program of a token pools: few where tokens are few, more where programs would
    mostly be of tokens that close no window."""
    each = 1
    while each < slices and rows * slices // each > max(_PROGRAMS, 2 * rows):
        each *= 2
    return each
