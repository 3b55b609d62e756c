"""How much of a matrix each rank holds, and how much a kernel executes. Pure; no torch.

A shard whose extent is not whole blocks is refused, or padded to whole blocks on every rank alike.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a dimension: `extent.logical` elements from `start`."""

    rank: int
    start: int
    extent: Extent


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
    extent: int, ranks: int, block: int, *, pad: bool, what: str = "dimension"
) -> tuple[Shard, ...]:
    """The shards of all ranks, each executed at the same extent.

    Cuts fall on block boundaries. With `pad`, ranks take whole blocks in order and the last ones
    may hold fewer, or none; without it an uneven split is a `RefusedError`.
    """
    if extent < 1 or ranks < 1 or block < 1:
        raise ValueError(f"split({extent}, {ranks}, {block})")
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
    shards = []
    for rank in range(ranks):
        start = min(rank * step, extent)
        stop = min(start + step, extent)
        shards.append(Shard(rank, start, Extent(stop - start, step)))
    return tuple(shards)
