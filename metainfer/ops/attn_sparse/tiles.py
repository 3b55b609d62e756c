"""Tile sizes of the sparse attention kernels, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """`heads` of one query by `n` keys."""

    heads: int
    n: int
    warps: int
    stages: int

    def shared_bytes(self, d: int, element: int) -> int:
        """Upper estimate: the query, key buffers, and the weights' way between warps."""
        return (self.heads * d + self.stages * self.n * d + self.heads * self.n) * element + 2048


WGMMA = Tile(heads=64, n=64, warps=8, stages=2)
SMALL = Tile(heads=32, n=16, warps=8, stages=2)  # shared memory of 101,376 B


def tile_for(capability: tuple[int, int] | None) -> Tile:
    """The tile of a card."""
    return WGMMA if capability is not None and capability[0] == 9 else SMALL


def splits_for(programs: int, tiles: int, units: int) -> int:
    """Into how many parts a query's keys are cut: a power of two, from shapes alone."""
    splits = 1
    while splits < min(MAX_SPLITS, tiles) and programs * splits < units:
        splits *= 2
    return splits
