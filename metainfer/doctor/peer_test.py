"""Proves peer access by bytes, in a child process under a watchdog.

Broken peer access hangs a GPU or corrupts data, so the child does it and this process only reads
its lines. A test that says nothing for too long is stuck: the child's whole process group is killed
and the rest goes on in a new one. What a child prints is never trusted beyond its form.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.doctor.peer_child import KINDS

CHILD = (sys.executable, "-m", "metainfer.doctor.peer_child")
STEP_TIMEOUT_S = 20.0  # the first step starts the driver on every GPU
TOTAL_TIMEOUT_S = 300.0
KILL_GRACE_S = 5.0
VERDICTS = ("right", "wrong", "refused", "failed")

Task = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class PeerProof:
    """One test of one directed pair. `verdict`: right, wrong, refused, stuck or failed."""

    source: int
    target: int
    kind: str  # write, read: by a kernel of the source GPU; copy: by its copy engine
    verdict: str
    detail: str


def tasks(devices: int) -> list[Task]:
    """Every kind on every directed pair."""
    pairs = [(i, j) for i in range(devices) for j in range(devices) if i != j]
    return [(i, j, kind) for i, j in pairs for kind in KINDS]


def prove_peers(
    devices: int,
    child: Sequence[str] = CHILD,
    step_timeout_s: float = STEP_TIMEOUT_S,
    total_timeout_s: float = TOTAL_TIMEOUT_S,
) -> tuple[PeerProof, ...]:
    """Test all pairs. Never raises for what a child does; leaves no child behind."""
    left = tasks(devices)
    ends = time.monotonic() + total_timeout_s
    found: list[PeerProof] = []
    while left:
        if time.monotonic() >= ends:
            why = f"not tested: {total_timeout_s:.0f} s were over"
            found += [PeerProof(*task, "failed", why) for task in left]
            break
        done = _one_child(child, left, step_timeout_s, ends)
        found += done
        left = left[len(done) :]
    return tuple(found)


def _one_child(
    child: Sequence[str], left: Sequence[Task], step_timeout_s: float, ends: float
) -> list[PeerProof]:
    """At least one outcome, in the order of `left`: the last may be a failure of the child."""
    process = subprocess.Popen(
        [*child, json.dumps(left)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    found: list[PeerProof] = []
    lines = _Lines(process)
    try:
        while len(found) < len(left):
            task = left[len(found)]
            line = lines.read(min(step_timeout_s, ends - time.monotonic()))
            if line is None:
                found.append(PeerProof(*task, "stuck", f"no answer within {step_timeout_s:.0f} s"))
                break
            if line == b"":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(KILL_GRACE_S)
                why = f"the test process closed its output, status {process.returncode}"
                found.append(PeerProof(*task, "failed", why))
                break
            verdict, detail = _outcome(line, task)
            if verdict != "begin":
                found.append(PeerProof(*task, verdict, detail))
                if verdict == "failed":
                    break
    finally:
        _kill(process)
    return found


def _outcome(line: bytes, task: Task) -> tuple[str, str]:
    """Verdict and detail of a line about `task`; anything else is a failure."""
    garbage = "failed", f"the test process printed {line[:80]!r}"
    try:
        body = json.loads(line)
    except ValueError:
        return garbage
    if not isinstance(body, dict):
        return garbage
    if (body.get("source"), body.get("target"), body.get("kind")) != task:
        return garbage
    verdict = body.get("verdict")
    if verdict == "begin":
        return "begin", ""
    return (verdict, str(body.get("detail", ""))) if verdict in VERDICTS else garbage


class _Lines:
    """Lines of a process's standard output, each with a limit in time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        self._held = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._descriptor, selectors.EVENT_READ)

    def read(self, timeout_s: float) -> bytes | None:
        """The next line; b"" at the end of the output, None when time is over."""
        ends = time.monotonic() + timeout_s
        while b"\n" not in self._held:
            rest = ends - time.monotonic()
            if rest <= 0 or not self._selector.select(rest):
                return None
            piece = os.read(self._descriptor, 65_536)
            if not piece:
                rest_of_it, self._held = self._held, b""
                return rest_of_it
            self._held += piece
            if len(self._held) > 1 << 20:
                return self._held[:80]
        line, _, self._held = self._held.partition(b"\n")
        return line or b" "


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started. A process stuck in the driver is left to init."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_GRACE_S)
    if process.stdout is not None:
        process.stdout.close()
