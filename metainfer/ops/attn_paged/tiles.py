"""Tile sizes of the attention kernels, read by kernel, declaration and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS = (64, 96, 128)
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """`m`: rows of queries (queries x heads of a group); `n`: keys; warps and stages."""

    m: int
    n: int
    warps: int
    stages: int

    def shared_bytes(self, d: int, element: int, capability: tuple[int, int] | None) -> int:
        """Upper estimate: key and value buffers, and the query and weight tiles.

        The pipeline holds one buffer less than it has stages, except where the product runs
        asynchronously and keeps its operand (wgmma, capability 9.x). The audit checks it.
        """
        lanes = 1 << (d - 1).bit_length()
        buffers = self.stages if capability is None or capability[0] == 9 else self.stages - 1
        streamed = 2 * self.n * lanes * buffers
        return (streamed + self.m * (lanes + self.n)) * element


WIDE = Tile(m=128, n=64, warps=8, stages=2)  # prefill chunks
WIDE_WGMMA = Tile(m=64, n=64, warps=4, stages=3)  # the same on 9.x; elsewhere it would spill
NARROW = Tile(m=16, n=64, warps=4, stages=3)  # few queries per sequence
SPLIT = Tile(m=16, n=64, warps=4, stages=3)  # one query per sequence, keys cut into splits


def rows_for(tile: Tile, group: int) -> int:
    """The tile's M for `group` heads per cache head: a power of two that holds one query."""
    return max(tile.m, 1 << (group - 1).bit_length())


def wide_for(capability: tuple[int, int] | None) -> Tile:
    """The chunk tile of a card. On an H200 the second is 12 to 17 % faster than the first."""
    return WIDE_WGMMA if capability is not None and capability[0] == 9 else WIDE


def prefers_wide(tokens: int, sequences: int, group: int, tile: Tile) -> bool:
    """Enough query rows per sequence to fill half of the wide `tile` (shapes only: no lengths)."""
    return tokens * group >= sequences * tile.m // 2


def splits_for(programs: int, tiles: int, units: int) -> int:
    """Into how many parts each sequence's keys are cut: a power of two.

    `programs`: one per sequence and cache head; `tiles`: key tiles of the longest possible
    context; about four programs per multiprocessor are wanted, each with two tiles or more. (On an
    H200 four is within 3 % of the best of two, four and eight, from 1 to 64 sequences.)
    """
    wanted = max(1, 4 * units // max(1, programs))
    most = max(1, min(MAX_SPLITS, tiles // 2))
    splits = 1
    while splits * 2 <= min(wanted, most):
        splits *= 2
    return splits
