"""A chunk whose rows are shared by ranks: what each has to borrow, and what it has to give.

Rank r computes a run of consecutive rows with whole weights. Beside its own rows its attention
needs what the cache held before the chunk, which lies with the rank that keeps the request, and
what the other ranks write. Both come into a copy of one layer's cache, made for the layer and
dropped behind it; new entries go to their keeper as well. Where every rank keeps every request
whole, the cache itself stands for the copy, and nothing is borrowed. Where the cache is dealt over
ranks, the past is gathered from their parts, and each takes its own of what is new.

Raw rows of a compressor are too wide to be gathered: ranks exchange those at their borders alone,
and those that the keeper's ring has to hold at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from metainfer.comm.peers import ALONE, Peers
from metainfer.comm.side import Pending
from metainfer.kv.store.moving import blank, lay, lift
from metainfer.kv.store.pools import LayerView
from metainfer.ops.linear.packed import PackedWeight

View = TypeVar("View", bound=LayerView)
Part = tuple[Mapping[str, PackedWeight], Mapping[str, Tensor]]
"""Weights as one rank holds them where ranks share matrices: packed and plain, by name."""


@dataclass(frozen=True, slots=True)
class Loan:
    """What rank `root` keeps of the past: `slots` [n] of its cache go to `to` [n] of all copies.
    Elsewhere `slots` are any."""

    root: int
    slots: Tensor
    to: Tensor


@dataclass(frozen=True, slots=True)
class Past:
    """What a copy of a dealt cache begins with. `mine` [k]: slots that this rank lifts of its part,
    equally many on all ranks; of what all lifted [ranks * k], `source` [n] goes to `to` [n] of the
    copy. All int64."""

    mine: Tensor
    source: Tensor
    to: Tensor


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """One cache group in one part of the model.

    `lines`: pages of a copy (lines of raw rows); 0: the cache itself is on every rank. `mine` [k]:
    what this rank gives, equally many on all ranks: slots of the copy, or rows of the chunk where
    raw rows are exchanged. Of what all gave [ranks * k, ...], `copy_from` goes to `copy_to` of the
    copy, and `home_from` to `home_to` of the cache. All int64. `past`: of a dealt cache; there
    `home_from` are slots of the copy.
    """

    lines: int
    loans: tuple[Loan, ...]
    mine: Tensor
    copy_from: Tensor
    copy_to: Tensor
    home_from: Tensor
    home_to: Tensor
    past: Past | None = None


class Spread:
    """One rank's view of a chunk. Every rank makes the same calls in the same order.

    Args:
        peers: the ranks that share the rows; alone where each computes all of them.
        parts: for each part of the model that has caches of its own (heads), every group.
        moved: bytes that this rank received: ``loans``, ``entries``, ``edges``, ``past``.
        shards: the ranks over which caches are dealt.
    """

    def __init__(
        self,
        peers: Peers,
        parts: Sequence[Sequence[GroupSpread]],
        moved: Counter[str],
        shards: Peers = ALONE,
    ) -> None:
        self._peers, self._parts, self._moved, self._shards = peers, parts, moved, shards

    @property
    def shares_rows(self) -> bool:
        """Whether other ranks compute rows of the chunk."""
        return self._peers.size > 1

    def borrow(self, cache: View, part: int = 0) -> View:
        """A copy of a layer's cache with what came before the chunk."""
        group = self._parts[part][cache.group]
        if not group.lines:
            return cache
        copy = blank(cache, group.lines)
        for loan in group.loans:
            stored = self._peers.broadcast(lift(cache, loan.slots), loan.root)
            lay(copy, loan.to, stored)
            self._count("loans", stored.nbytes if loan.root != self._peers.rank else 0)
        if group.past is not None and len(group.past.mine):
            lifted = lift(cache, group.past.mine)
            self._count("past", (self._shards.size - 1) * lifted.nbytes)
            every = self._shards.rows(lifted)
            _place(copy, group.past.to, every, group.past.source)
        assert isinstance(copy, type(cache))
        return copy

    def borrow_all(self, caches: Mapping[str, View]) -> dict[str, View]:
        """`borrow` for each of a layer's caches."""
        return {name: self.borrow(cache) for name, cache in caches.items()}

    def share(self, copy: View, cache: View, part: int = 0) -> None:
        """What every rank has written to its copy, to all copies and to its keeper's cache."""
        self.start_share(copy, cache, part).wait()

    def start_share(self, copy: View, cache: View, part: int = 0) -> Pending[None]:
        """`share`, under way: others' entries are nowhere before it is waited for."""
        group = self._parts[part][cache.group]
        sent = None
        if len(group.mine) and self.shares_rows:
            own = lift(copy, group.mine)
            self._count("entries", (self._peers.size - 1) * own.nbytes)
            sent = self._peers.start_rows(own)
        return _Shared(group, copy, cache, sent)

    def edges(self, copy: View, rows: Tensor) -> Tensor:
        """Raw rows [T, 2, C] that stand before this rank's own, into its copy; all of them come
        back for `keep`."""
        group = self._parts[0][copy.group]
        gathered = self._gather("edges", rows.index_select(0, group.mine))
        _place(copy, group.copy_to, gathered, group.copy_from)
        return gathered

    def keep(self, cache: View, gathered: Tensor) -> None:
        """The last raw rows of each request, into its keeper's ring."""
        group = self._parts[0][cache.group]
        _place(cache, group.home_to, gathered, group.home_from)

    def _gather(self, what: str, rows: Tensor) -> Tensor:
        self._count(what, (self._peers.size - 1) * rows.nbytes)
        return self._peers.rows(rows)

    def _count(self, what: str, size: int) -> None:
        self._moved[what] += size


@dataclass(frozen=True, slots=True)
class _Shared(Pending[None]):
    """Entries on their way; `sent`: None where this rank computes all rows."""

    group: GroupSpread
    copy: LayerView
    cache: LayerView
    sent: Pending[Tensor] | None

    def wait(self) -> None:
        group = self.group
        if self.sent is not None:
            gathered = self.sent.wait()
            _place(self.copy, group.copy_to, gathered, group.copy_from)
            if group.past is None:
                _place(self.cache, group.home_to, gathered, group.home_from)
        if group.past is not None:
            lay(self.cache, group.home_to, lift(self.copy, group.home_from))


def _place(view: LayerView, to: Tensor, gathered: Tensor, source: Tensor) -> None:
    """What `source` names of `gathered`, at `to`; often there is nothing."""
    if len(to):
        lay(view, to, gathered.index_select(0, source))
