"""Tile sizes of the grouped FP8 products, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128
"""The side of a weight block that shares one scale."""

FEW_ROWS = 128
"""Most tokens that are one tile."""


@dataclass(frozen=True, slots=True)
class GroupTile:
    """`m` tokens by `n` weight rows, `k` channels a step; `each` such programs fill a
    multiprocessor.

    `tma`: operands arrive by the bulk copy engine (9.0 and newer). `group`: tiles of tokens that
    share weight rows through the cache. `early`: programs come before the kernel in front has ended
    and ask for their weights (9.0 and newer).
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    each: int = 2
    tma: bool = False
    group: int = 32
    early: bool = False

    def shared_bytes(self) -> int:
        """Upper estimate: buffers and one decoded tile, or the sums' way to memory."""
        buffers = self.stages * (self.n + 2 * self.m) * self.k + 2 * self.n * self.k
        return max(buffers, self.m * self.n * 4) + 1024


HOPPER = (
    GroupTile(16, 64, 128, warps=4, stages=5),
    GroupTile(32, 64, 128, warps=4, stages=4),
    GroupTile(64, 64, 128, warps=4, stages=4),
    GroupTile(128, 64, 64, warps=4, stages=4),
)
OTHERS = (
    GroupTile(16, 64, 128, warps=4, stages=3),
    GroupTile(32, 64, 128, warps=4, stages=3),
    GroupTile(64, 64, 64, warps=4, stages=3),
    GroupTile(128, 64, 64, warps=4, stages=3),
)
"""By tokens, up to `FEW_ROWS`."""

CHUNK_WGMMA = GroupTile(256, 128, 64, warps=8, stages=4, each=1, tma=True)
CHUNK = GroupTile(128, 128, 64, warps=8, stages=3, each=1)


def tile_for(capability: tuple[int, int] | None, rows: int) -> GroupTile:
    """The tile of a card for a number of tokens."""
    hopper = capability is not None and capability[0] == 9
    if rows > FEW_ROWS:
        return CHUNK_WGMMA if hopper else CHUNK
    return next(tile for tile in (HOPPER if hopper else OTHERS) if rows <= tile.m)


def splits_for(tile: GroupTile, rows: int, n: int, k: int, units: int) -> int:
    """Into how many equal parts K is cut: as many programs as fill `units` multiprocessors, four
    steps each at least."""
    tiles = -(-rows // tile.m) * -(-n // tile.n)
    best = 1
    for parts in range(2, k // tile.k // 4 + 1):
        if k // tile.k % parts == 0 and tiles * parts <= tile.each * units:
            best = parts
    return best
