"""How often a dead engine is started again, and after which pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 600.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Restarts:
    """At most `most` restarts within `WINDOW_S`; each pause is twice the one before it.

    `count` restarts led to a ready engine; the latest took `last_s` seconds from death to ready.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._deaths: deque[tuple[float, str]] = deque()
        self.count = 0
        self.last_s = 0.0

    def died(self, cause: str) -> float | None:
        """Note a death; seconds to wait before the next start, None when there is none."""
        self._deaths.append((self._clock(), cause))
        self._forget()
        deaths = len(self._deaths)
        return None if deaths > self.most else _pause(deaths - 1)

    @property
    def next_pause_s(self) -> float | None:
        """The pause after a death that happened now; None when it would be the last."""
        self._forget()
        deaths = len(self._deaths)
        return None if deaths >= self.most else _pause(deaths)

    @property
    def first_cause(self) -> str:
        """Of the deaths that count, the cause of the first."""
        return self._deaths[0][1] if self._deaths else ""

    @property
    def deaths(self) -> int:
        """Deaths within the window."""
        return len(self._deaths)

    def ready(self, seconds: float) -> None:
        """The engine is ready, `seconds` after its death."""
        self.count += 1
        self.last_s = seconds

    def _forget(self) -> None:
        while self._deaths and self._clock() - self._deaths[0][0] > WINDOW_S:
            self._deaths.popleft()


def _pause(before: int) -> float:
    return min(FIRST_PAUSE_S * 2.0**before, LONGEST_PAUSE_S)
