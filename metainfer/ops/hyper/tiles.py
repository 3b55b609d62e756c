"""Tile sizes of the hyper-connection kernels, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STREAMS = 4
"""Streams that a program holds side by side."""

MAX_WIDTH = 16384
"""Widest stream: the program that collapses a token holds one whole."""

FEW = 8
"""Most tokens of the form that ends in its first kernel: the program that arrives last at a token
collapses it. One program a token then, whatever the matrix unit's shortest side."""

SPLIT_LANES = 64
"""Most parts into which the channels of a token are cut."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`m` rows of the matrix unit, of which `per` hold tokens, by `d` channels of every stream."""

    m: int
    per: int
    d: int
    warps: int
    stages: int

    def shared_bytes(self, n: int) -> int:
        """Upper estimate: weights in flight, and the operands' way into the matrix unit."""
        lanes = product_lanes((n + 2) * n)
        weights = (n * (self.stages - 1) + 2) * lanes * self.d * 4
        return weights + 6 * self.m * self.d * 4 + 2048


SINGLE = Tile(m=16, per=1, d=32, warps=4, stages=2)
SHORT = Tile(m=16, per=16, d=32, warps=4, stages=2)
LONG = Tile(m=64, per=64, d=32, warps=8, stages=2)
LONG_ROWS = 1024
"""From so many tokens on each weight is used for 64 of them."""

FINISH_WARPS = 4
MIX_LANES = 1024


def tile_for(rows: int) -> Tile:
    """The tile for a number of tokens."""
    if rows <= FEW:
        return SINGLE
    return SHORT if rows < LONG_ROWS else LONG


def splits_for(blocks: int, chunks: int, units: int) -> int:
    """Into how many parts the channels are cut: a power of two, about two programs a unit."""
    splits = 1
    while splits < SPLIT_LANES and 2 * splits <= chunks and blocks * splits < 2 * units:
        splits *= 2
    return splits


def product_lanes(numbers: int) -> int:
    """Columns of the product: a power of two, 16 or more."""
    return max(16, 1 << (numbers - 1).bit_length())
