"""A group of rank processes on this host: started together, called together, failing together.

Each rank is a process under a guardian, so none outlives us. `ProcessGroup` keeps the contract of
`WorkerGroup`; what crosses is plain data. The first cause of a failed call is the earliest error
that is not about another rank's trouble; a rank that died comes before those that noticed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from metainfer.core.errors import InternalError
from metainfer.workers import wire
from metainfer.workers.group import GroupError, RankHealth, RankRefusedError
from metainfer.workers.process import Child, spawn_python, terminate_all

START_S = 120.0
SETTLE_S = 5.0
_MODULE = "metainfer.workers.rank_main"


class ProcessGroup:
    """Ranks 0 .. size - 1. Made by `spawn`; use as a context manager.

    `token` names the group, new for each and known to its ranks alone: by it they meet.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self._children: list[Child] = []
        self._channels: list[socket.socket] = []
        self._failure: GroupError | None = None
        self._posted: deque[str] = deque()  # methods whose answers nobody has read yet
        self._closed = False

    @classmethod
    def spawn(
        cls,
        target: str,
        size: int,
        *,
        facts: Sequence[Mapping[str, Any]] | None = None,
        environ: Callable[[int], Mapping[str, str]] | None = None,
        log: Callable[[int], Path] | None = None,
        start_s: float = START_S,
    ) -> ProcessGroup:
        """Start `size` ranks; each makes ``module:callable`` of `target` from its `RankFacts`.

        `facts`: per rank, plain data. `environ` and `log`: of a rank.

        Raises:
            GroupError: a rank did not come up; the others are ended first. `RankRefusedError` where
                its own reason was a `UserError`.
        """
        group = cls(secrets.token_hex(8))
        try:
            for rank in range(size):
                group._start(rank, environ, log)
            for rank, channel in enumerate(group._channels):
                own = dict(facts[rank]) if facts is not None else {}
                with contextlib.suppress(BrokenPipeError):  # seen as a death below
                    wire.send(channel, wire.Hello(target, rank, size, group.token, own))
            group._collect("spawn", time.monotonic() + start_s)
        except BaseException:
            group.close(0.0)
            raise
        return group

    @property
    def size(self) -> int:
        return len(self._children)

    @property
    def pids(self) -> tuple[int | None, ...]:
        return tuple(child.pid for child in self._children)

    def call(self, method: str, *arguments: object) -> list[object]:
        self._send(method, arguments)
        while self._posted:
            self._collect(self._posted.popleft(), None)
        return self._collect(method, None)

    def post(self, method: str, *arguments: object) -> None:
        self._send(method, arguments)
        self._posted.append(method)

    def health(self) -> tuple[RankHealth, ...]:
        if self._closed:
            return tuple(RankHealth(rank, False, "closed") for rank in range(self.size))
        detail = str(self._failure) if self._failure is not None else ""
        return tuple(
            RankHealth(rank, False, child.describe_exit())
            if not child.alive
            else RankHealth(rank, not detail, detail)
            for rank, child in enumerate(self._children)
        )

    def close(self, grace_s: float = 10.0) -> None:
        if self._closed:
            return
        self._closed = True
        for channel in self._channels:
            with contextlib.suppress(OSError):
                wire.send(channel, wire.Leave())
        deadline = time.monotonic() + (grace_s if self._failure is None else min(grace_s, 1.0))
        for child in self._children:
            child.wait(max(0.0, deadline - time.monotonic()))
        terminate_all(self._children, 0.0)
        for channel in self._channels:
            channel.close()

    def _start(
        self,
        rank: int,
        environ: Callable[[int], Mapping[str, str]] | None,
        log: Callable[[int], Path] | None,
    ) -> None:
        ours, theirs = socket.socketpair()
        self._channels.append(ours)
        with theirs:
            self._children.append(
                spawn_python(
                    _MODULE,
                    [str(theirs.fileno())],
                    name=f"rank {rank}",
                    environ={**os.environ, **(environ(rank) if environ is not None else {})},
                    pass_fds=[theirs.fileno()],
                    log=log(rank) if log is not None else None,
                )
            )

    def _send(self, method: str, arguments: tuple[object, ...]) -> None:
        if self._closed:
            raise InternalError(f"{method} was called on a closed group")
        if self._failure is not None:
            raise self._failure
        for channel in self._channels:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.send(channel, wire.Invoke(method, arguments))

    def _collect(self, method: str, deadline: float | None) -> list[object]:
        """Everyone's answer in rank order, or the first cause once all have answered or had
        `SETTLE_S` to do so."""
        results: list[object] = [None] * self.size
        failures: dict[int, wire.Raised] = {}
        waiting = set(range(self.size))
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while waiting:
                left = None if deadline is None else deadline - time.monotonic()
                ready = selector.select(left) if left is None or left > 0 else []
                if not ready:
                    break
                for key, _ in ready:
                    rank = key.data
                    answer = self._answer(rank)
                    waiting.discard(rank)
                    selector.unregister(key.fileobj)
                    if isinstance(answer, wire.Done):
                        results[rank] = answer.result
                        continue
                    failures[rank] = answer
                    settled = time.monotonic() + SETTLE_S
                    deadline = settled if deadline is None else min(deadline, settled)
        if waiting and not failures:
            rank = min(waiting)
            text = "gave no sign of life in time"
            failures[rank] = wire.Raised("", text, "", time.monotonic())
        if not failures:
            return results
        first = min(failures, key=lambda rank: _order(failures, rank))
        found = failures[first]
        others = len(failures) - 1
        if found.code and method == "spawn":
            self._failure = RankRefusedError(
                first, method, found.text, others, found.remedy, found.code
            )
        else:
            shown = f"{found.kind}: {found.text}" if found.kind else found.text
            self._failure = GroupError(first, method, shown, others, found.remedy)
        for rank in sorted(failures, key=lambda rank: _order(failures, rank)):
            told = failures[rank]
            self._failure.add_note(f"rank {rank}: {told.trace or told.text}")
        raise self._failure

    def _answer(self, rank: int) -> wire.Done | wire.Raised:
        body = wire.receive(self._channels[rank])
        if body is not None:
            return wire.from_rank(body)
        at = time.monotonic()
        child = self._children[rank]
        child.wait(SETTLE_S)
        return wire.Raised("", child.describe_exit(), "", at)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(10.0 if kind is None else 1.0)


def _order(failures: Mapping[int, wire.Raised], rank: int) -> tuple[bool, float, int]:
    """Own causes before what was heard of others, then by time. An error about a rank that has no
    failure of its own counts as a cause."""
    found = failures[rank]
    heard = found.about is not None and found.about != rank and found.about in failures
    return heard, found.at, rank
