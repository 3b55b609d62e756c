"""Sizes of the sampling kernels, read by kernels, calls and audit. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """`part`: ids that one program of a row looks at, with `warps`. `lanes`: ids that the program
    of a whole row then looks at in one go, with `row_warps`.

    The same for any number of rows: sums are rounded in the order that it gives."""

    part: int
    warps: int
    lanes: int = 4096
    row_warps: int = 16


TILE = Tile(1024, 4)

BINS = 256
"""Bins of a row's logits below its best one: 32 for every doubling of the distance plus one."""

BLOCK = 16
"""Parts whose bins the program of a row adds up at a time."""
