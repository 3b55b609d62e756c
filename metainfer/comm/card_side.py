"""A stream of a card beside the current one: where forks go there. Captures hold fork and join."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from metainfer.comm.side import Pending

T = TypeVar("T")


class CardSide:
    """One stream of `device`.

    What forks read and write is kept by their `Pending`: the allocator may give it to others only
    once the current stream stands behind the fork. A fork that nobody waits for, after an error, is
    open until the next `run`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None  # the latest fork's end, until waited for

    def fork(self, work: Callable[[], T]) -> Pending[T]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            value = work()
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record(self._stream)
        self._last = ended
        return _Fork(self, work, value, ended)

    def run(self, work: Callable[[], T]) -> T:
        """On the current stream where no fork is open: it stands behind all of them."""
        return self.fork(work).wait() if self._last is not None else work()

    def join(self, ended: torch.cuda.Event) -> None:
        """The current stream goes on behind `ended`, and so behind every earlier fork."""
        torch.cuda.current_stream(self._stream.device).wait_event(ended)
        if ended is self._last:
            self._last = None


class _Fork(Pending[T]):
    def __init__(
        self, side: CardSide, work: Callable[[], T], value: T, ended: torch.cuda.Event
    ) -> None:
        self._side, self._work, self._value, self._ended = side, work, value, ended

    def wait(self) -> T:
        self._side.join(self._ended)
        return self._value
