"""Work that nothing waits for yet, and where it is done meanwhile.

A fork begins behind all that was asked for before it; who waits for it goes on behind its end. On a
card that is a stream beside the current one, elsewhere the order of calls, so both give the same
bits. Collectives of a rank share one side: every rank makes the same calls, so one stream carries
them in one order everywhere, and no two ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

T = TypeVar("T")
Value = TypeVar("Value", covariant=True)


class Pending(Protocol[Value]):
    """What a fork will give. Nobody may touch what it reads or writes before `wait`, once."""

    def wait(self) -> Value: ...


class Side(Protocol):
    """Where forks go."""

    def fork(self, work: Callable[[], T]) -> Pending[T]:
        """Begin `work` behind what was asked for so far."""
        ...

    def run(self, work: Callable[[], T]) -> T:
        """`work` at once, but behind every open fork."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Pending[T]):
    """A fork that has ended."""

    value: T

    def wait(self) -> T:
        return self.value


class InOrder:
    """No other stream: a fork is done when it is asked for."""

    def fork(self, work: Callable[[], T]) -> Pending[T]:
        return Done(work())

    def run(self, work: Callable[[], T]) -> T:
        return work()


IN_ORDER = InOrder()


class Turns(AbstractContextManager[None]):
    """A side that is taken inside ``with``, while lanes take turns, and `in_pieces`. Outside nobody
    would compute meanwhile: there a fork is done when it is asked for.

    `pieces`: into how many a product is cut by its rows, so that it computes beside its own sums.
    Lanes that take turns keep it whole: each computes beside the other's.
    """

    def __init__(self, side: Side = IN_ORDER) -> None:
        self._side, self._taken, self.pieces = side, False, 1

    @contextmanager
    def in_pieces(self, count: int) -> Iterator[None]:
        """Taken, with products in `count` pieces."""
        self.pieces = count
        try:
            with self:
                yield
        finally:
            self.pieces = 1

    def __enter__(self) -> None:
        self._taken = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """What an error left open still reads and writes memory that others are given next: they
        come behind it."""
        self._taken = False
        try:
            self._side.run(lambda: None)
        except Exception as broken:
            if error is None:
                raise
            error.add_note(f"Nor could what it left open be waited for: {broken}")

    def fork(self, work: Callable[[], T]) -> Pending[T]:
        return (self._side if self._taken else IN_ORDER).fork(work)

    def run(self, work: Callable[[], T]) -> T:
        return (self._side if self._taken else IN_ORDER).run(work)
