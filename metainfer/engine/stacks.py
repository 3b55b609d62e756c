"""Prints every thread's stack when a step takes too long, even if the interpreter is locked.

The timer is a thread of C (`faulthandler`). Arming it starts that thread anew, so it is armed
again at most every twentieth part of its time; it goes off that much early at most.
"""

from __future__ import annotations

import faulthandler
import time


class StackTimer:
    """`after_s` seconds; 0 switches it off."""

    def __init__(self, after_s: float = 0.0) -> None:
        self._after_s = after_s
        self._armed_at: float | None = None

    def begin(self) -> None:
        """A step begins."""
        if not self._after_s:
            return
        now = time.monotonic()
        if self._armed_at is None or now - self._armed_at > self._after_s / 20:
            faulthandler.dump_traceback_later(self._after_s, repeat=False)
            self._armed_at = now

    def rest(self) -> None:
        """No step runs until the next `begin`."""
        if self._armed_at is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_at = None
