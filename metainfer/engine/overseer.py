"""What the parent of an engine process knows of it without asking: its last steps, and whether it
hangs. Keeps the dumps in the records folder.

The flight recorder's block is memory of both processes; the parent reads it while the engine hangs
with the interpreter locked, and after it was killed.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import metainfer
from metainfer.core.env import cache_dir
from metainfer.engine import recorder

_log = logging.getLogger("metainfer.engine")
KEPT = 10
"""Dumps that are kept; older ones go."""
_QUIET_S = 10.0


class Overseer:
    """Over one engine process; `descriptor` goes to it, and is closed here once it has it."""

    def __init__(self, hang_after_s: float) -> None:
        self._hang_after_s = hang_after_s
        self.descriptor = os.memfd_create("metainfer-flight")
        os.ftruncate(self.descriptor, recorder.SIZE)
        self._map = mmap.mmap(self.descriptor, recorder.SIZE)
        self.hung = ""  # why the engine is thought to hang, empty when it is not
        self._hung_step = -1
        self._saved: dict[str, float] = {}

    @property
    def look_every_s(self) -> float:
        """How often `look` is worth a call."""
        return min(1.0, max(0.02, self._hang_after_s / 20))

    def flight(self) -> dict[str, Any]:
        """The last steps and events as plain data."""
        return recorder.read(memoryview(self._map))

    def look(self) -> bool:
        """See whether a step hangs; True when it has for twice the time, and must be ended."""
        if not self._hang_after_s:
            return False
        busy = recorder.in_flight(memoryview(self._map))
        if busy is None or busy[1] < self._hang_after_s:
            if self.hung:
                _log.warning("the engine goes on: step %d came to an end", self._hung_step)
            self.hung = ""
            return False
        step, seconds = busy
        if not self.hung:
            self._hung_step = step
            current = self.flight()["in_flight"]
            what = f"step {step}" if current is None else recorder.describe(current)
            self.hung = f"{what}, without a result for {seconds:.0f} s"
            _log.error(f"the engine hangs: {self.hung}")
            return False
        return seconds > 2 * self._hang_after_s

    def save(self, reason: str, details: Mapping[str, object]) -> Path | None:
        """Write a dump, at most one a reason in ten seconds; its file, or None.

        A disk that is full costs the dump and a warning, nothing else.
        """
        now = time.monotonic()
        if now - self._saved.get(reason, -_QUIET_S) < _QUIET_S:
            return None
        self._saved[reason] = now
        document = {
            "schema": 1,
            "reason": reason,
            "at": time.time(),
            "version": metainfer.__version__,
            **details,
            "flight": self.flight(),
        }
        return _write(folder(), document)

    def close_descriptor(self) -> None:
        """The engine has its copy."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def folder() -> Path:
    """Where dumps are."""
    return cache_dir() / "records" / "flight"


def latest() -> dict[str, Any] | None:
    """The newest dump that can be read."""
    for path in sorted(folder().glob("*.json"), reverse=True):
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None


def _write(target: Path, document: Mapping[str, object]) -> Path | None:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"{time.time() % 1:.6f}"[1:]
    path = target / f"{stamp}-{document['reason']}-{os.getpid()}.json"
    try:
        target.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(document))
        partial.replace(path)
        for old in sorted(target.glob("*.json"))[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        _log.warning(f"no dump is kept: {error.strerror}")
        return None
    return path
