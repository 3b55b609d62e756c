"""Tile sizes of the hyper-connection kernels, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STREAMS = 4
"""Streams that a program holds side by side."""

MAX_WIDTH = 16384
"""Widest stream: the program that collapses a token holds one whole."""


@dataclass(frozen=True, slots=True)
class Tile:
    """16 tokens by `d` channels a warp at a time: `down` warps for other tokens, `across` for other
    numbers of the site. Channels of a token are cut into at most `splits` parts, so that about
    `programs` run on each unit. `early`: a launch begins while the one before ends (on 9.0 and
    newer)."""

    d: int
    down: int
    across: int
    splits: int
    programs: int
    early: bool = False

    @property
    def m(self) -> int:
        return 16 * self.down

    @property
    def warps(self) -> int:
        return self.down * self.across

    @property
    def batch(self) -> int:
        """Tokens whose weights one program makes: what it sums at once is bounded."""
        return SUMMED // self.splits


SUMMED = 128
SHORT = Tile(d=32, down=1, across=4, splits=128, programs=1, early=True)
MIDDLE = Tile(d=32, down=4, across=1, splits=128, programs=2)
LONG = Tile(d=32, down=4, across=1, splits=8, programs=8)
SHORT_ROWS, MIDDLE_ROWS = 64, 1023
"""Most tokens of a tile. Few wait for reads: one launch mixes and multiplies, a program takes the
same channels of all streams. Many share each weight: mixing is a launch of its own, and a program
takes channels of the streams end to end."""

MIX_LANES = 1024


def tile_for(rows: int) -> Tile:
    """The tile for a number of tokens."""
    if rows <= SHORT_ROWS:
        return SHORT
    return MIDDLE if rows <= MIDDLE_ROWS else LONG


def splits_for(tile: Tile, blocks: int, chunks: int, units: int) -> int:
    """Into how many parts the channels are cut: a power of two."""
    splits = 1
    while splits < tile.splits and 2 * splits <= chunks and blocks * splits < tile.programs * units:
        splits *= 2
    return splits


def product_lanes(numbers: int) -> int:
    """Columns of the product and one more: a power of two, 16 or more."""
    return max(16, 1 << numbers.bit_length())


def finish_warps(width: int) -> int:
    """Warps of the program that holds a token's channels: up to 32 of each stream a thread."""
    return min(16, max(4, width // 1024))
