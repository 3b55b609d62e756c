"""Who has the budget of time and hears an abort where streams wait by themselves."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from metainfer.comm.layout import Code

LOOK_S, FAR = 0.02, 1 << 62
"""How often a watch looks, and what it lets waits find."""

Missing = tuple[int, int, int, int]
"""A counter that is behind: peer, which, expected, found."""


class Waiting(Protocol):
    """A rank whose streams wait."""

    budget_s: float

    @property
    def failed(self) -> bool: ...

    @property
    def told(self) -> bool: ...

    def missing(self) -> list[Missing]: ...

    def let_go(self, code: Code, missing: list[Missing], waited_ns: int) -> None: ...


class Watch:
    """Lets a rank's streams go when it is told to give up, or when nothing that they wait for comes
    within its budget. It goes on until `close`: a late peer may count over what it was let find."""

    def __init__(self, rank: Waiting) -> None:
        self._rank, self._ended = rank, threading.Event()
        self._thread = threading.Thread(target=self._run, name="copy-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rank, since = self._rank, time.monotonic_ns()
        before: list[Missing] = []
        while not self._ended.wait(LOOK_S):
            now, missing, told = time.monotonic_ns(), rank.missing(), rank.told
            if missing != before:
                before, since = missing, now
            late = now - since > rank.budget_s * 1e9
            # A second look: this thread may have been held up between the clock and the counters.
            if missing and (told or rank.failed or late) and rank.missing() == missing:
                rank.let_go(Code.ABORTED if told else Code.TIMEOUT, missing, now - since)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
