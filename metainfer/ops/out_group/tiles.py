"""Tile sizes of the grouped FP8 products, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128
"""Channels and rows of a weight block that shares one scale."""

FEW_ROWS = 128
"""Most tokens of the weight-streaming form; for more the matrix is decoded first."""


@dataclass(frozen=True, slots=True)
class GroupTile:
    """`m` tokens at most by `n` weight rows, 128 channels a step; `each` such programs fill a
    multiprocessor."""

    m: int
    n: int
    warps: int
    stages: int
    each: int = 2

    def shared_bytes(self) -> int:
        """Upper estimate: buffers of both operands, or the sums' way to memory."""
        return max(self.stages * (self.n + 2 * self.m) * BLOCK, self.m * self.n * 4) + 1024


HOPPER = (
    GroupTile(16, 64, warps=4, stages=4, each=4),
    GroupTile(32, 64, warps=4, stages=4, each=3),
    GroupTile(64, 64, warps=4, stages=4),
    GroupTile(128, 64, warps=8, stages=3),
)
OTHERS = (
    GroupTile(16, 64, warps=4, stages=3),
    GroupTile(32, 64, warps=4, stages=3),
    GroupTile(64, 64, warps=4, stages=3, each=1),
    GroupTile(128, 64, warps=8, stages=2, each=1),
)
"""By tokens."""


def tile_for(capability: tuple[int, int] | None, rows: int) -> GroupTile:
    """The tile of a card for a number of tokens, `FEW_ROWS` at most."""
    hopper = capability is not None and capability[0] == 9
    return next(tile for tile in (HOPPER if hopper else OTHERS) if rows <= tile.m)


def splits_for(tile: GroupTile, n: int, k: int, units: int) -> int:
    """Into how many equal parts K is cut: as many programs as fill `units` multiprocessors, four
    steps each at least."""
    blocks, best = k // BLOCK, 1
    for parts in range(2, blocks // 4 + 1):
        if blocks % parts == 0 and n // tile.n * parts <= tile.each * units:
            best = parts
    return best
