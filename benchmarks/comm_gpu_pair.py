"""Rank processes on one or two GPUs; sections of `comm_gpu.py`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from metainfer.comm.model import host_limit_us
from metainfer.workers.group import GroupError
from metainfer.workers.ranks import ProcessGroup

KIB, MIB = 1 << 10, 1 << 20
STREAMS_S = 55.0
Report = dict[str, Any]


def group_of(devices: list[int], environ: dict[str, str]) -> ProcessGroup:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    facts = [{"device": device} for device in devices]
    return ProcessGroup.spawn(
        "comm_gpu_rank:Rank",
        len(devices),
        facts=facts,
        environ=lambda rank: {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "32", **environ},
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


def streams() -> Report:
    """Two devices without peer access: the grids that calls may have by size (stripes, turns),
    copies by streams and by kernels that count, and NCCL, each row with its share of the least time
    that the link allows."""
    grids = {
        MIB: [(16, 8), (16, 16), (8, 8), (16, 4)],
        256 * KIB: [(16, 4), (16, 8), (8, 4), (8, 8)],
        512 * KIB: [(8, 4), (16, 8), (8, 8)],
        128 * KIB: [(8, 1), (8, 4), (16, 4)],
        2 * MIB: [(16, 8), (16, 16)],
    }
    report: Report = {"rows": {}, "wrong": []}
    end = time.monotonic() + STREAMS_S
    with group_of([0, 1], {"NCCL_P2P_DISABLE": "1"}) as group:

        def row(backend: str, algorithm: str, size: int, graph: bool, how: str) -> None:
            if time.monotonic() > end:
                report["cut"] = "no time left"
                return
            repeat = 20 if size <= MIB else 4
            found = group.call("time", backend, algorithm, size, repeat, graph)
            worst: Report = max(found, key=lambda each: each["us"])  # type: ignore[index]
            worst["of_limit"] = round(worst["us"] / host_limit_us(algorithm, 2, size), 3)
            name = f"{backend} {algorithm} {size} {'graph' if graph else 'eager'} {how}".strip()
            report["rows"][name] = worst
            print(name, worst, flush=True)

        def verify(backend: str, algorithm: str, sizes: list[int]) -> None:
            wrong = group.call("verify", backend, algorithm, sizes, 2)
            report["wrong"] += wrong[0] + wrong[1]

        for backend in ("host", "copy", "nccl"):
            group.call("open", backend)
        for by_streams in (True, False):
            how = f"by_streams={by_streams}"
            group.call("shape", "copy", {"by_streams": by_streams})
            verify("copy", "copy", [2, 5 * MIB + 6])
            for mib in (64, 16, 4, 8, 32) if by_streams else (64, 16, 4):
                row("copy", "copy", mib * MIB, False, how)
        group.call("shape", "copy", {"by_streams": True})
        for piece in (MIB, 2 * MIB, 8 * MIB):
            group.call("shape", "copy", {"piece_bytes": piece})
            row("copy", "copy", 16 * MIB, False, f"piece={piece}")
        group.call("warm", "host", "one_shot", [MIB])
        for size, shapes in grids.items():
            for blocks, lag in shapes:
                group.call("shape", "host", {"blocks": blocks, "lag": lag})
                verify("host", "one_shot", [size + 2])
                row("host", "one_shot", size, True, f"blocks={blocks} turns={lag}")
        group.call("shape", "host", {"blocks": 0, "lag": 0})
        for size in (8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB):
            row("host", "one_shot", size, True, "by size")
            row("nccl", "ring", size, True, "")
        for size in (16 * MIB, 64 * MIB):
            row("nccl", "ring", size, False, "")
    return report


def rows() -> Report:
    """Two devices without peer access: rows gathered and sums of them scattered, by kernels (a
    call's and in graphs) and by copy engines, beside NCCL; verified, then timed."""
    report: Report = {"rows": {}, "wrong": []}
    ways = [("copy", "copy", False), ("host", "direct", False), ("host", "direct", True)]
    ways.append(("nccl", "ring", False))
    with group_of([0, 1], {"NCCL_P2P_DISABLE": "1"}) as group:
        for backend in ("host", "copy", "nccl"):
            group.call("open", backend)
        group.call("warm", "host", "one_shot", [MIB])
        for kind in ("all_gather", "reduce_scatter"):
            for backend, algorithm, _ in ways[:2]:
                odd = [2, 4098, MIB + 2, 33 * MIB + 6, 64 * MIB]
                wrong = group.call("verify", backend, algorithm, odd, 3, kind)
                report["wrong"] += wrong[0] + wrong[1]
            for size in (64 * MIB, 32 * MIB, 8 * MIB, 2 * MIB):
                for backend, algorithm, graph in ways:
                    found = group.call("time", backend, algorithm, size, 4, graph, kind)
                    name = f"{kind} {backend} {size} {'graph' if graph else 'eager'}"
                    report["rows"][name] = max(found, key=lambda each: each["us"])  # type: ignore[index]
                    print(name, report["rows"][name], flush=True)
    return report


def pair(peer: bool) -> Report:
    """Two devices: ours and NCCL in one process group, without or with peer access."""
    environ = {} if peer else {"NCCL_P2P_DISABLE": "1"}
    sizes = [8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
    report: Report = {"environ": environ, "rows": {}, "wrong": []}
    ours = [("ipc", "one_shot"), ("ipc", "two_shot")] if peer else []
    ours += [] if peer else [("host", "one_shot"), ("host", "two_shot"), ("copy", "copy")]
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
