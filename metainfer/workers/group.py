"""Groups of rank workers: one object per rank, called together, raising together.

The engine knows only `WorkerGroup`. `InprocGroup` holds all ranks in this process: one device, and
tests. Groups of processes speak the same contract, so arguments and results must be plain data
(numbers, text, msgspec structs), never tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from metainfer.core.errors import InternalError, MetaInferError, UserError


class GroupError(MetaInferError):
    """A rank failed; the group is unusable from then on. `rank` failed first: by rank order in one
    process, by time between processes."""

    default_code = "rank_failed"

    def __init__(
        self,
        rank: int,
        method: str,
        error: BaseException | str,
        others: int,
        remedy: str = "",
        code: str = "",
    ) -> None:
        more = f" ({others} more ranks failed)" if others else ""
        shown = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        super().__init__(f"rank {rank} failed in {method}: {shown}{more}", remedy, code=code)
        self.rank = rank


class RankRefusedError(GroupError, UserError):
    """A rank could not start for a reason that is the user's; with its remedy and code."""


@dataclass(frozen=True, slots=True)
class RankHealth:
    """Whether a rank can answer, from the operating system, and why not."""

    rank: int
    alive: bool
    detail: str = ""


class WorkerGroup(Protocol):
    """Ranks 0 .. size - 1, made by the implementation's own `spawn`."""

    @property
    def size(self) -> int: ...

    def call(self, method: str, *arguments: object) -> list[object]:
        """Call one method with the same arguments on every rank; results in rank order.

        Raises:
            GroupError: any rank raised; the cause is the first by rank. Later calls raise too.
        """
        ...

    def post(self, method: str, *arguments: object) -> None:
        """Have one method called on every rank, and go on; what it returns is dropped.

        Raises:
            GroupError: an earlier call failed. Should this one fail, the next `call` raises it.
        """
        ...

    def health(self) -> tuple[RankHealth, ...]:
        """Every rank's state; never blocks and never raises."""
        ...

    def close(self, grace_s: float = 10.0) -> None:
        """End all ranks. Idempotent; nothing of them is left afterwards."""
        ...


class InprocGroup:
    """All ranks in this process, called one after another in rank order."""

    def __init__(self, workers: Sequence[object]) -> None:
        self._workers = list(workers)
        self._failure: GroupError | None = None
        self._closed = False

    @classmethod
    def spawn(cls, make: Callable[[int], object], size: int) -> InprocGroup:
        """Make rank 0, then the others; a failing constructor closes those already made.

        Raises:
            GroupError: a constructor raised.
        """
        made: list[object] = []
        for rank in range(size):
            try:
                made.append(make(rank))
            except Exception as error:
                cls(made).close()
                raise GroupError(rank, "spawn", error, 0) from error
        return cls(made)

    @property
    def size(self) -> int:
        return len(self._workers)

    def call(self, method: str, *arguments: object) -> list[object]:
        if self._closed:
            raise InternalError(f"{method} was called on a closed group")
        if self._failure is not None:
            raise self._failure
        results: list[object] = []
        failures: list[tuple[int, Exception]] = []
        for rank, worker in enumerate(self._workers):
            try:
                results.append(getattr(worker, method)(*arguments))
            except Exception as error:  # noqa: BLE001  kept: every rank runs, then all raise
                failures.append((rank, error))
        if failures:
            rank, first = failures[0]
            self._failure = GroupError(rank, method, first, len(failures) - 1)
            raise self._failure from first
        return results

    def post(self, method: str, *arguments: object) -> None:
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(GroupError):  # kept for the next call
            self.call(method, *arguments)

    def health(self) -> tuple[RankHealth, ...]:
        if self._closed:
            return tuple(RankHealth(rank, False, "closed") for rank in range(self.size))
        detail = str(self._failure) if self._failure is not None else ""
        return tuple(RankHealth(rank, not detail, detail) for rank in range(self.size))

    def close(self, grace_s: float = 10.0) -> None:
        """Call `close` of each worker that has one, the last rank first."""
        if self._closed:
            return
        self._closed = True
        failures: list[tuple[int, Exception]] = []
        for rank in reversed(range(self.size)):
            close = getattr(self._workers[rank], "close", None)
            if close is None:
                continue
            try:
                close()
            except Exception as error:  # noqa: BLE001  kept: the others must be closed as well
                failures.append((rank, error))
        if failures:
            rank, first = failures[-1]
            raise GroupError(rank, "close", first, len(failures) - 1) from first

    def __enter__(self) -> InprocGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
