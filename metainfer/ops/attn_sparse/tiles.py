"""Tile sizes of the sparse attention kernels, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 64
PLACE_BYTES = 8
"""Where one key of one query is. Of entries with scales, theirs as well."""
HELD_BYTES = 512 << 20
"""Most bytes of a chunk's decoded entries (a million tokens at ratio 4 take half of it)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`heads` of one query by `n` keys; `sliced`: a warp has an eighth of the channels."""

    heads: int
    n: int
    warps: int
    stages: int
    sliced: bool = False

    def shared_bytes(
        self, d: int, element: int, capability: tuple[int, int] | None, scaled: bool = False
    ) -> int:
        """Upper estimate: the query, the weights' way between warps, keys and where they are.

        Two stages copy a tile ahead: one finds its places, one its keys. Where the product is
        asynchronous (9.x, 64 heads) plain keys take a buffer for every stage. Scaled ones come as
        bytes and a tail, and decoded ones pass through more memory. Slices' logits meet there. The
        audit checks it.
        """
        hopper = capability is not None and capability[0] == 9 and self.heads >= 64
        ahead = max(1, (self.stages - 1) // 2)
        if self.sliced:
            logits = 8 * self.heads * self.n * 4
            return self.heads * d * element + self.n * (d * element + 16) * ahead + logits
        if scaled:
            key = 3 * ahead + (2 if hopper else 4)
        else:
            key = element * (self.stages if hopper else ahead)
        return self.heads * (d + self.n) * element + self.n * (d * key + 16 * ahead)


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Of the Hopper form: `heads` of one query by as many keys, the next on their way.

    `resident`: as many programs as the card has multiprocessors take the queries one after the
    other; else a program each.
    """

    heads: int = 64
    n: int = 64
    warps: int = 8
    resident: bool = True

    def shared_bytes(self, d: int, element: int) -> int:
        """The query, two tiles of keys, the weights, and the way between groups of warps."""
        return element * (self.heads * d + 2 * self.n * d + self.heads * self.n) + 1024


HOPPER = HopperTile()
WGMMA = Tile(heads=64, n=64, warps=8, stages=2)
WGMMA_SCALED = Tile(heads=64, n=32, warps=8, stages=3)
SLICED = Tile(heads=32, n=32, warps=8, stages=2, sliced=True)  # of 101,376 B nearly all
SMALL = Tile(heads=32, n=32, warps=8, stages=5)  # where a slice would be under 16 channels
SMALL_SCALED = Tile(heads=16, n=16, warps=8, stages=5)
FEW = Tile(heads=16, n=64, warps=4, stages=2)
"""Where a call has so few queries that time is latency; and for scaled keys."""
FEW_SCALED = Tile(heads=16, n=32, warps=4, stages=3)
FEW_ROWS = 4
"""Most queries of such a call."""


def tile_for(capability: tuple[int, int] | None, scaled: bool = False, d: int = 512) -> Tile:
    """The tile of a card for `d` channels; `scaled`: entries are decoded on the way."""
    if capability is not None and capability[0] == 9:
        return WGMMA_SCALED if scaled else WGMMA
    if scaled:
        return SMALL_SCALED
    return SLICED if d >= 128 else SMALL


def hopper_for(rows: int, scaled: bool = False) -> Tile | HopperTile:
    """The tile of the Hopper form, by the number of queries."""
    if scaled:
        return FEW_SCALED if rows <= FEW_ROWS else WGMMA_SCALED
    return FEW if rows <= FEW_ROWS else HOPPER


def splits_for(programs: int, tiles: int, units: int) -> int:
    """Into how many parts a query's keys are cut: a power of two, from shapes alone.

    As many as one wave of `units` programs holds: a second wave costs more than longer parts.
    """
    splits = 1
    while splits < min(MAX_SPLITS, tiles) and 2 * programs * splits <= units:
        splits *= 2
    return splits


def decodes_first(rows: int, sequences: int, window: int, listed: int, kept: int, d: int) -> bool:
    """Whether scaled latents are decoded before the queries read them, from shapes alone.

    `kept`: entries that the table of one sequence can hold; `listed`: of them per query. Once for
    all pays when queries read more than twice what there is, and the copy must fit `HELD_BYTES`.
    """
    copied = rows + sequences * (window + kept)
    return rows * (window + listed) > 2 * copied and sequences * kept * d * 2 <= HELD_BYTES
