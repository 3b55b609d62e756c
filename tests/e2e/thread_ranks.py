"""Ranks as threads of the test's own process, so that it sees into each of them.

They load, run and answer as the rank processes do (`engine.rank.Rank`). What differs: how they are
called, how they meet (at a barrier, where each lays its tensor beside the others'), and that they
are told the plan, which they would resolve again.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from metainfer.comm.exact import canonical_sum
from metainfer.comm.peers import Place, Ranks
from metainfer.comm.side import Pending, Turns
from metainfer.engine.engine import Engine
from metainfer.engine.machine import Machine, open_machine
from metainfer.engine.rank import Rank
from metainfer.planner.resolve import Resolved
from metainfer.workers.wire import RankFacts

PATIENCE_S = 300.0
"""A rank that is lost for so long ends the test; one that fails lets the others go at once."""


class Meeting:
    """What the ranks of one group lay side by side."""

    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self.gate = threading.Barrier(size, timeout=PATIENCE_S)

    def all(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x.clone()
        self.gate.wait()
        found = list(self.parts)
        self.gate.wait()
        assert len({(part.shape, part.dtype) for part in found}) == 1, "ranks bring other shapes"
        return found


class ThreadPeers:
    """`comm.peers.Peers` of one rank; what is started goes where `turns` says."""

    def __init__(self, meeting: Meeting, rank: int, turns: Turns) -> None:
        self._meeting, self.rank, self.size = meeting, rank, len(meeting.parts)
        self._turns = turns

    def rows(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.all(self.rank, x))

    def columns(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.all(self.rank, x), dim=1)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return self._meeting.all(self.rank, x)[root].clone()

    def sum(self, x: Tensor) -> Tensor:
        return canonical_sum(self._meeting.all(self.rank, x))

    def sum_rows(self, x: Tensor) -> Tensor:
        return self.sum(x).chunk(self.size)[self.rank]

    def start_sum(self, x: Tensor) -> Pending[Tensor]:
        return self._turns.fork(lambda: self.sum(x))

    def start_sum_rows(self, x: Tensor) -> Pending[Tensor]:
        return self._turns.fork(lambda: self.sum_rows(x))

    def start_rows(self, x: Tensor, numbers: int = 0) -> Pending[Tensor]:
        return self._turns.fork(lambda: self.rows(x))


class Links:
    """As `comm.host_ranks.HostRanks`."""

    def __init__(self, place: Place, meetings: Mapping[tuple[int, ...], Meeting]) -> None:
        turns, found = Turns(), dict[str, Any]()
        for role, ranks in place.groups().items():
            found[role] = ThreadPeers(meetings[ranks], ranks.index(place.rank), turns)
        self.ranks = Ranks(**found, turns=turns)

    def settle(self) -> None: ...

    def check(self) -> None: ...

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class ThreadGroup:
    """As `workers.ranks.ProcessGroup`; `ranks` are here."""

    def __init__(self, size: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._lock = threading.Lock()
        self._posted: list[Future[Any]] = []
        self.ranks: list[Rank] = []

    def meet(self, place: Place) -> Links:
        with self._lock:
            for ranks in place.groups().values():
                self._meetings.setdefault(ranks, Meeting(len(ranks)))
        return Links(place, self._meetings)

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        return self._read([self._start(rank, act) for rank in range(len(self._threads))])

    def call(self, method: str, *arguments: object) -> list[Any]:
        posted, self._posted = self._posted, []
        self._read(posted)
        return self.each(lambda rank: getattr(self.ranks[rank], method)(*arguments))

    def post(self, method: str, *arguments: object) -> None:
        self._posted += [
            self._start(rank, lambda rank: getattr(self.ranks[rank], method)(*arguments))
            for rank in range(len(self._threads))
        ]

    def close(self, grace_s: float = 0.0) -> None:
        for meeting in self._meetings.values():
            meeting.gate.abort()
        for thread in self._threads:
            thread.shutdown()

    def _start(self, rank: int, act: Callable[[int], Any]) -> Future[Any]:
        def acted() -> Any:
            try:
                return act(rank)
            except BaseException:
                for meeting in self._meetings.values():
                    meeting.gate.abort()
                raise

        return self._threads[rank].submit(acted)

    def _read(self, futures: Sequence[Future[Any]]) -> list[Any]:
        errors = [error for each in futures if (error := each.exception()) is not None]
        if errors:  # one that was only let go is no cause
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [each.result() for each in futures]


@cache
def one_machine(platform: str | None = None) -> Machine:
    """This machine, whose kernels are proven once."""
    return open_machine(platform)


class Told:
    """The machine as a rank finds it, with what the engine has resolved."""

    def __init__(self, machine: Machine, resolved: Resolved) -> None:
        self._machine, self._resolved = machine, resolved

    def resolve(self, *_: Any) -> Resolved:
        return self._resolved

    resolve_proven = resolve

    def recall(self, dtype: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


@contextmanager
def ranks_as_threads() -> Iterator[list[ThreadGroup]]:
    """Inside, engines of several ranks have them as threads of this process; their groups."""
    groups: list[ThreadGroup] = []
    found: list[Resolved] = []
    resolve = Machine.resolve_proven

    def resolved(*given: Any) -> Resolved:
        found.append(resolve(*given))
        return found[-1]

    def spawn(target: str, size: int, *, facts: Sequence[Any], **_: Any) -> ThreadGroup:
        group = ThreadGroup(size)
        groups.append(group)
        token = secrets.token_hex(4)
        group.ranks = group.each(
            lambda rank: Rank(RankFacts(rank=rank, world=size, token=token, facts=facts[rank]))
        )
        return group

    def links_of(token: str, place: Place, *_: Any, **__: Any) -> Links:
        return groups[-1].meet(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metainfer.workers.ranks.ProcessGroup.spawn", staticmethod(spawn))
        patch.setattr("metainfer.engine.rank.links_of", links_of)
        patch.setattr("metainfer.engine.engine.open_machine", one_machine)
        patch.setattr(
            "metainfer.engine.rank.open_machine", lambda _: Told(one_machine(), found[-1])
        )
        patch.setattr(Machine, "resolve_proven", resolved)
        yield groups
        for group in groups:
            group.close()


def making_room(rng: random.Random) -> Callable[[Engine], None]:
    """As soon as it can, and now and then, the last in order gives its place up, needed or not."""
    preempted = 0

    def act(engine: Engine) -> None:
        nonlocal preempted
        domain = rng.choice(engine.scheduler.domains)
        if not domain.running or domain.running[-1].in_flight:
            return
        if not preempted or rng.random() < 1 / 8:
            preempted += 1
            engine.scheduler._preempt(domain, domain.running.pop())

    return act
