"""`serve_fake` with each turn of its event loop timed: ``serve_turns.py PORT ... -- ENGINE ARGS``.

The time is the loop's thread's own processor time, so that it is the same on a busy machine: what
a turn costs is how long everybody else waits. Turns from a moment after the engine is ready count;
the longest are written to the file of ``--turns FILE`` when the server ends. Runs on asyncio's own
loop, whose turns can be seen.
"""

from __future__ import annotations

import asyncio.events
import json
import sys
import time
from array import array
from pathlib import Path

KEPT = 10


class Turns:
    """The processor time of every turn, in seconds."""

    def __init__(self) -> None:
        self.all = array("d")

    def write(self, path: str) -> None:
        found = sorted(self.all, reverse=True)

        def at(part: float) -> float:
            return round(1e3 * found[int(len(found) * part)], 4) if found else 0.0

        document = {
            "turns": len(found),
            "longest_ms": [round(1e3 * seconds, 2) for seconds in found[:KEPT]],
            "p999_ms": at(0.001),
            "p99_ms": at(0.01),
            "p50_ms": at(0.5),
        }
        Path(path).write_text(json.dumps(document))


def watch(turns: Turns, engine_ready: list[bool]) -> None:
    """Time every turn from the first one after `engine_ready` holds something."""
    handle = asyncio.events.Handle
    plain = handle._run

    def run(self: asyncio.events.Handle) -> None:
        begin = time.thread_time()
        plain(self)
        if engine_ready:
            turns.all.append(time.thread_time() - begin)

    handle._run = run  # type: ignore[method-assign]


def main() -> int:
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    import serve_fake

    from metainfer.server import run

    path = sys.argv.pop(sys.argv.index("--turns") + 1)
    sys.argv.remove("--turns")
    turns, ready = Turns(), list[bool]()
    watch(turns, ready)
    settle = run._settle_collector

    def settled() -> None:
        settle()
        asyncio.get_running_loop().call_later(0.2, ready.append, True)

    run._settle_collector = settled
    try:
        return serve_fake.main()
    finally:
        turns.write(path)


if __name__ == "__main__":
    sys.exit(main())
