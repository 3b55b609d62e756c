"""Rank processes on one or two GPUs; sections of `comm_gpu.py`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from metainfer.comm.segment import sweep
from metainfer.workers.group import GroupError
from metainfer.workers.ranks import ProcessGroup

KIB, MIB = 1 << 10, 1 << 20
Report = dict[str, Any]


def group_of(devices: list[int], environ: dict[str, str]) -> ProcessGroup:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    facts = [{"device": device} for device in devices]
    return ProcessGroup.spawn(
        "comm_gpu_rank:Rank",
        len(devices),
        facts=facts,
        environ=lambda rank: {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "32", **environ},
        after_close=[sweep],
    )


def kill_one(devices: list[int], environ: dict[str, str], backend: str) -> Report:
    """Rank 1 is killed in mid-call; what is raised, and how soon."""
    group = group_of(devices, environ)
    try:
        group.call("open", backend, 0, 2.0)
        group.call("warm", backend, "one_shot", [8192])
        begin = time.monotonic()
        group.call("die", backend, 1)
        return {"error": "none"}
    except GroupError as error:
        return {"error": str(error), "ranks": error.__notes__, "s": time.monotonic() - begin}
    finally:
        group.close()


def one_card() -> Report:
    """Two processes on one device: correctness of `ipc`, `host` and copies, and a killed rank."""
    report: Report = {}
    with group_of([0, 0], {}) as group:
        for backend, algorithm in (
            ("ipc", "one_shot"),
            ("ipc", "two_shot"),
            ("host", "one_shot"),
            ("host", "two_shot"),
            ("copy", "two_shot"),
        ):
            if not any(name.startswith(backend) for name in report):
                group.call("open", backend)
            sizes = [8192, 131_074] if backend != "copy" else [4098, MIB]
            group.call("warm", backend, algorithm, sizes)
            wrong = group.call("verify", backend, algorithm, sizes, 10)
            report[f"{backend} {algorithm}"] = {"wrong": wrong[0] + wrong[1]}
    report["killed, host"] = kill_one([0, 0], {}, "host")
    report["killed, ipc"] = kill_one([0, 0], {}, "ipc")
    return report


def pair(peer: bool) -> Report:
    """Two devices: ours and NCCL in one process group, without or with peer access."""
    environ = {} if peer else {"NCCL_P2P_DISABLE": "1"}
    sizes = [8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
    report: Report = {"environ": environ, "rows": {}, "wrong": []}
    ours = [("ipc", "one_shot"), ("ipc", "two_shot")] if peer else []
    ours += [] if peer else [("host", "one_shot"), ("host", "two_shot"), ("copy", "two_shot")]
    with group_of([0, 1], environ) as group:
        for backend in dict.fromkeys(name for name, _ in ours):
            group.call("open", backend)
        group.call("open", "nccl")
        for backend, algorithm in [*ours, ("nccl", "ring")]:
            able = [x for x in sizes if backend in ("nccl", "copy") or x <= 4 * MIB]
            able = [x for x in able if backend != "copy" or x >= MIB]
            group.call("warm", backend, algorithm, able)
            if backend != "nccl":
                wrong = group.call("verify", backend, algorithm, [8192, 131_074, *able[-1:]], 3)
                report["wrong"] += wrong[0] + wrong[1]
            for size in able:
                for graph in (False, True) if backend != "copy" else (False,):
                    repeat = 20 if size <= MIB else 4
                    found = group.call("time", backend, algorithm, size, repeat, graph)
                    worst = max(found, key=lambda row: row["us"])  # type: ignore[index]
                    how = "graph" if graph else "eager"
                    report["rows"][f"{backend} {algorithm} {size} {how}"] = worst
    report["killed"] = kill_one([0, 1], environ, ours[0][0])
    return report
