"""The ranks that share a model's matrices, as its forward pass sees them.

A model says where ranks hold parts of one sum, or columns or rows of one matrix; alone, each call
gives back what it got and launches nothing. Sums are exact (`request.Precision.EXACT`): in rank
order, rounded once, so every rank goes on with the same bits, unless `native` sums were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from metainfer.comm.api import Communicator
from metainfer.comm.request import Op, Precision, Request
from metainfer.comm.side import IN_ORDER, Done, Pending, Side, Turns
from metainfer.core.plan import LayoutPlan

if TYPE_CHECKING:
    from torch import Tensor


class Peers(Protocol):
    """`size` ranks, of which this is `rank`. Every rank makes the same calls in the same order.

    ``start_``: the same call, which goes on while the caller does (`side.Pending`).
    """

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of `x`, which may be overwritten: in `x` itself if contiguous."""
        ...

    def sum_rows(self, x: Tensor) -> Tensor:
        """This rank's rows [T, ...] of the sum over ranks of x [size * T, ...]."""
        ...

    def rows(self, x: Tensor) -> Tensor:
        """Every rank's x [T, ...], one after the other: [size * T, ...]."""
        ...

    def columns(self, x: Tensor) -> Tensor:
        """Every rank's x [R, C], side by side: [R, size * C]."""
        ...

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """The x of rank `root`; of equal shape elsewhere, where it is overwritten."""
        ...

    def start_sum(self, x: Tensor) -> Pending[Tensor]: ...

    def start_sum_rows(self, x: Tensor) -> Pending[Tensor]: ...

    def start_rows(self, x: Tensor, numbers: int = 0) -> Pending[Tensor]:
        """The last `numbers` columns [T, n] int32 are those of experts, which a stand-in for peers
        has to know; who has peers need not."""
        ...


class Alone:
    """One rank."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def sum_rows(self, x: Tensor) -> Tensor:
        return x

    def rows(self, x: Tensor) -> Tensor:
        return x

    def columns(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return x

    def start_sum(self, x: Tensor) -> Pending[Tensor]:
        return Done(x)

    def start_sum_rows(self, x: Tensor) -> Pending[Tensor]:
        return Done(x)

    def start_rows(self, x: Tensor, numbers: int = 0) -> Pending[Tensor]:
        return Done(x)


class Linked:
    """Several ranks over a `Communicator` whose rules all of them have agreed on.

    `precision`: of its sums. `capturing`: whether what is called now goes into a graph. `side`:
    where started calls go, one for all groups of a rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        comm: Communicator,
        *,
        precision: Precision = Precision.EXACT,
        capturing: Callable[[], bool] = lambda: False,
        side: Side = IN_ORDER,
    ) -> None:
        self.rank, self.size = rank, size
        self.comm = comm
        self._precision, self._capturing, self._side = precision, capturing, side

    def sum(self, x: Tensor) -> Tensor:
        return self._side.run(self._sum(x))

    def start_sum(self, x: Tensor) -> Pending[Tensor]:
        return self._side.fork(self._sum(x))

    def sum_rows(self, x: Tensor) -> Tensor:
        return self._side.run(self._sum_rows(x))

    def start_sum_rows(self, x: Tensor) -> Pending[Tensor]:
        return self._side.fork(self._sum_rows(x))

    def rows(self, x: Tensor) -> Tensor:
        return self._side.run(self._rows(x))

    def start_rows(self, x: Tensor, numbers: int = 0) -> Pending[Tensor]:
        return self._side.fork(self._rows(x))

    def columns(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        parts = self.rows(x).view(self.size, rows, width)
        return parts.transpose(0, 1).reshape(rows, self.size * width)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        x = x.contiguous()
        return self._side.run(lambda: self._run(Op.BROADCAST, x.numel(), x, x, root))

    # Memory is taken outside the calls: on the current stream, which waits for the side's.

    def _sum(self, x: Tensor) -> Callable[[], Tensor]:
        x = x.contiguous()
        return lambda: self._run(Op.ALL_REDUCE, x.numel(), x, x)

    def _sum_rows(self, x: Tensor) -> Callable[[], Tensor]:
        x, out = x.contiguous(), x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        return lambda: self._run(Op.REDUCE_SCATTER, x.numel(), x, out)

    def _rows(self, x: Tensor, **extras: int) -> Callable[[], Tensor]:
        x, out = x.contiguous(), x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        return lambda: self._run(Op.ALL_GATHER, out.numel(), x, out, **extras)

    def _run(
        self, op: Op, count: int, given: Tensor, out: Tensor, root: int = 0, **extras: int
    ) -> Tensor:
        dtype = str(given.dtype).removeprefix("torch.")
        request = Request(
            op=op,
            count=count,
            dtype=dtype,
            world=self.size,
            root=root,
            precision=self._precision,
            captured=self._capturing(),
        )
        self.comm.run(request, given, out, **extras)
        return out


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's company in each role.

    `tensor`: ranks that share heads and channels, one KV domain. `expert`: ranks that hold whole
    experts of one set. `domains`: one rank of each KV domain that sends tokens to that set.
    `turns`: the side of their collectives. `prompts`: ranks that share the rows of a chunk.
    `shards`: tensor ranks over which the cache is dealt.
    """

    tensor: Peers = ALONE
    expert: Peers = ALONE
    domains: Peers = ALONE
    prompts: Peers = ALONE
    shards: Peers = ALONE
    turns: Turns = field(default_factory=Turns)

    def of_prompts(self) -> Ranks:
        """As a chunk sees them whose rows `prompts` share: each is a domain of its own."""
        meet = self.prompts if self.expert.size > 1 else ALONE
        return Ranks(expert=self.expert, domains=meet, prompts=self.prompts)


SINGLE = Ranks()


@dataclass(frozen=True, slots=True)
class Place:
    """Where `rank` stands under a layout: domains are runs of `tensor` ranks, sets of experts runs
    of `expert` ranks."""

    layout: LayoutPlan
    rank: int

    @property
    def domain(self) -> int:
        return self.rank // self.layout.tensor

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks of other domains compute this rank's tokens."""
        return self.layout.expert > self.layout.tensor

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Role -> the ranks of this rank's group, in order; roles in which it is alone left out.

        Groups that hold the same ranks are one: their first role names it.
        """
        tensor, expert, rank = self.layout.tensor, self.layout.expert, self.rank
        first = rank // tensor * tensor
        found = {"tensor": tuple(range(first, first + tensor))}
        block = rank // expert * expert
        found["expert"] = tuple(range(block, block + expert))
        if self.shares_tokens:
            found["domains"] = tuple(range(block + rank % tensor, block + expert, tensor))
        if self.layout.shards > 1:
            first = rank // self.layout.shards * self.layout.shards
            found["shards"] = tuple(range(first, first + self.layout.shards))
        if self.layout.prefill > 1:
            found["prompts"] = tuple(range(self.layout.ranks))
        return {role: ranks for role, ranks in found.items() if len(ranks) > 1}
