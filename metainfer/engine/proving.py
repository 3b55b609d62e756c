"""Kernels go through their cases in child processes: several at once, and one may die of it.

Compiling a kernel and computing what it should give take seconds of one core each; a card's first
start tries thirty. A kernel that crashes its process or never ends has failed, and the next child
goes on behind it.
"""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from metainfer.kernels.evidence import Qualification
from metainfer.workers.process import Child, spawn_python

CHILD = "metainfer.engine.proving_child"
START_S = 120.0
"""Until a child has imported what it needs."""
NOT_BEGUN = "the test process does not start"
PASSED = "passed"
TIME_LIMIT_S = 120.0
"""For the cases of one kernel, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Tried:
    """`outcome`: passed, failed, crashed, hung. `seconds`: of its cases, where they ended."""

    impl: str
    outcome: str
    reasons: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def qualification(self) -> Qualification:
        return Qualification(self.impl, self.outcome == PASSED, self.reasons)


def try_apart(
    ids: Sequence[str],
    platform: str,
    dtype: str,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    lanes: int = 1,
    child: str = CHILD,
) -> Iterator[Tried]:
    """How each of `ids` fared, as they end; `lanes` children share them out beforehand, and the
    cores: references are computed on the host, and threads of all for each core stand still."""
    cores = len(os.sched_getaffinity(0))
    environ = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // lanes))}
    # Queues are meant for an engine's own streams; a dozen children with 32 each share one card.
    environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    told: SimpleQueue[Tried | BaseException | None] = SimpleQueue()

    def lane(share: Sequence[str]) -> None:
        try:
            _try_all(share, platform, dtype, time_limit_s, child, environ, told.put)
            told.put(None)
        except BaseException as error:  # noqa: BLE001 - raised by who waits for the outcomes
            told.put(error)

    shares = [share for start in range(lanes) if (share := ids[start::lanes])]
    with ThreadPoolExecutor(max_workers=max(1, len(shares))) as pool:
        for share in shares:
            pool.submit(lane, share)
        running = len(shares)
        while running:
            found = told.get()
            if isinstance(found, Tried):
                yield found
                continue
            running -= 1
            if found is not None:
                raise found


def _try_all(
    ids: Sequence[str],
    platform: str,
    dtype: str,
    time_limit_s: float,
    child: str,
    environ: Mapping[str, str],
    tell: Callable[[Tried], None],
) -> None:
    """In order. A child that dies costs the kernel it was at."""
    left = list(ids)
    while left:
        found = _one_child(left, platform, dtype, time_limit_s, child, environ, tell)
        if not found:  # the child did not even begin
            tell(Tried(left[0], "crashed", (NOT_BEGUN,)))
        left = left[max(1, found) :]


def _one_child(
    ids: Sequence[str],
    platform: str,
    dtype: str,
    time_limit_s: float,
    module: str,
    environ: Mapping[str, str],
    tell: Callable[[Tried], None],
) -> int:
    """Tells of the first of `ids`, up to the one at which the child ended; how many."""
    reading, writing = os.pipe()
    arguments = [str(writing), platform, dtype, *ids]
    try:
        child = spawn_python(
            module, arguments, name="proving", pass_fds=(writing,), environ=environ
        )
    finally:
        os.close(writing)
    count, current, limit = 0, "", START_S
    with open(reading, "rb", buffering=0) as pipe, child:
        lines = _Lines(pipe.fileno())
        while (line := lines.read(limit)) is not None:
            body = json.loads(line)
            if "begin" in body:
                current, limit = body["begin"], time_limit_s
                continue
            outcome = PASSED if body["passed"] else "failed"
            tell(Tried(body["impl"], outcome, tuple(body["reasons"]), body["seconds"]))
            count, current, limit = count + 1, "", START_S
        if current and lines.ended:
            tell(Tried(current, "crashed", (_end(child),)))
        elif current:
            tell(Tried(current, "hung", (f"no answer within {time_limit_s:g} s",)))
            child.terminate(0.0)
    return count + bool(current)


def _end(child: Child) -> str:
    child.wait(10.0)
    return child.describe_exit()


class _Lines:
    """Lines from a descriptor, each with a limit in time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._held = descriptor, b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(descriptor, selectors.EVENT_READ)
        self.ended = False

    def read(self, timeout_s: float) -> bytes | None:
        """The next line; None at the end (`ended`) or when time is over."""
        ends = time.monotonic() + timeout_s
        while b"\n" not in self._held:
            rest = ends - time.monotonic()
            if rest <= 0 or not self._selector.select(rest):
                return None
            piece = os.read(self._descriptor, 65_536)
            if not piece:
                self.ended = True
                return None
            self._held += piece
        line, _, self._held = self._held.partition(b"\n")
        return line
