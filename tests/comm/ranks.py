"""Several ranks for a test: threads over `LocalGroup`, or processes that run a small program."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from metainfer.comm.backends.local import LocalGroup
from metainfer.comm.backends.slabs import SlabComm
from metainfer.comm.plan import CommPlan, Offer, choose
from metainfer.comm.request import Request
from metainfer.comm.segment import socket_name
from metainfer.workers.process import Child, spawn

_count = itertools.count()


def plan_of(request: Request, algorithm: str = "direct", backend: str = "local") -> CommPlan:
    return choose(request, [Offer(backend=backend, algorithm=algorithm)])


def together(group: LocalGroup, step: Callable[[SlabComm], object]) -> list[object]:
    """`step` on every rank at once; results in rank order, exceptions among them."""
    results: list[object] = [None] * len(group.ranks)

    def run(comm: SlabComm) -> None:
        try:
            results[comm.rank] = step(comm)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results[comm.rank] = error

    threads = [threading.Thread(target=run, args=(comm,)) for comm in group.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def token() -> str:
    return f"test-{os.getpid()}-{next(_count)}"


def start(
    program: str, world: int, name: str, folder: Path, arguments: Sequence[str] = ()
) -> list[Child]:
    """`world` processes running ``program`` with argv ``token rank world folder *arguments``."""
    return [
        spawn(
            [sys.executable, "-c", program, name, str(rank), str(world), str(folder), *arguments],
            name=f"rank {rank}",
            log=folder / f"{rank}.log",
        )
        for rank in range(world)
    ]


def leftovers(*tokens: str) -> list[str]:
    """Of groups that are gone: those whose meeting place somebody still holds."""
    held = Path("/proc/net/unix").read_text().split()
    return [token for token in tokens if socket_name(token).replace("\0", "@") in held]
