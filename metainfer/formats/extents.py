"""How much of a matrix each rank holds, and how much a kernel executes. Pure; no torch.

A shard whose extent is not whole blocks is refused, or padded to whole blocks on every rank alike.
Buffers are sized from executed extents only: `buffer_elements` takes nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

from metainfer.core.errors import RefusedError
from metainfer.core.verdict import Reason


@dataclass(frozen=True, slots=True)
class Extent:
    """`logical` elements that mean something, `executed` elements that a kernel touches."""

    logical: int
    executed: int

    def __post_init__(self) -> None:
        if not 0 <= self.logical <= self.executed:
            raise ValueError(f"extent {self.logical} executed as {self.executed}")

    @property
    def padding(self) -> int:
        return self.executed - self.logical


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a dimension: `extent.logical` elements from `start`."""

    rank: int
    start: int
    extent: Extent


def executed(logical: int, *tiles: int) -> Extent:
    """`logical` rounded up to a multiple of every tile (block, kernel tile, scale tile)."""
    unit = lcm(*tiles)
    return Extent(logical, -(-logical // unit) * unit)


def buffer_elements(*extents: Extent) -> int:
    """Elements of a buffer over these dimensions."""
    return prod(extent.executed for extent in extents)


def objections(extent: int, ranks: int, block: int) -> list[Reason]:
    """Why `extent` cannot be cut into `ranks` equal shards of whole blocks; empty if it can."""
    share, rest = divmod(extent, ranks)
    if rest:
        message = f"{extent} does not divide by {ranks} ranks"
    elif share % block:
        message = f"{extent} / {ranks} = {share} is not a multiple of the block of {block}"
    else:
        return []
    return [Reason("shard-block", message, {"extent": extent, "ranks": ranks, "block": block})]


def split(
    extent: int, ranks: int, block: int, *, pad: bool, tile: int = 1, what: str = "dimension"
) -> tuple[Shard, ...]:
    """The shards of all ranks, each executed at the same extent.

    Cuts fall on block boundaries. With `pad`, ranks take whole blocks in order and the last ones
    may hold fewer, or none; without it an uneven split is a `RefusedError`. `tile` is what the
    kernel needs beyond the block (a scale tile, for one): it pads too, and never moves a cut.
    """
    if extent < 1 or ranks < 1 or block < 1 or tile < 1:
        raise ValueError(f"split({extent}, {ranks}, {block}, tile={tile})")
    reasons = objections(extent, ranks, block)
    if reasons and not pad:
        raise RefusedError(
            f"{what} of {extent} cannot be split over {ranks} ranks.",
            "Choose another number of ranks, or allow padding with zero weights.",
            reasons=reasons,
            code="shard_block",
        )
    blocks = -(-extent // block)
    step = -(-blocks // ranks) * block
    whole = executed(step, block, tile).executed
    shards = []
    for rank in range(ranks):
        start = min(rank * step, extent)
        stop = min(start + step, extent)
        shards.append(Shard(rank, start, Extent(stop - start, whole)))
    return tuple(shards)


@dataclass(frozen=True, slots=True)
class Overhead:
    """What padding costs over all ranks: elements stored for nothing, and their share of work."""

    elements: int
    work: float


def overhead(shards: Sequence[Shard], other: int = 1) -> Overhead:
    """Padding of `shards` of one dimension of a matrix whose other dimension is `other`."""
    useful = sum(shard.extent.logical for shard in shards)
    padding = sum(shard.extent.padding for shard in shards)
    return Overhead(padding * other, padding / useful)
