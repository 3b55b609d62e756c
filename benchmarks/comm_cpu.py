"""Collectives between processes of a host: exact at every size, and what a killed rank leaves.

    python benchmarks/comm_cpu.py [--out FILE] [--world 2 4 8] [--largest 67108864] [--kills 20]

Needs no GPU and no second machine; other work on the host only makes it slower. Three parts:

* ``exact``: all-reduce by each algorithm over each number of ranks, 2 B to 64 MiB, even and odd
  counts, bfloat16, float16, float32; zeros of both signs, infinities, NaN, the largest finite and
  subnormal numbers strewn in. Every rank's bits against those of a sum written here: in float32,
  in rank order, rounded once;
* ``calls``: 100,000 calls of changing size and algorithm with random delays of a rank, across the
  wrap of the call counter, each result compared;
* ``killed``: ranks call on and on, one of them is killed at a random moment; how long the others
  take to end with an error that names it, and what is left of the group.

Prints one JSON document, written after every row. Exit status 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from metainfer.bench.conditions import surroundings
from metainfer.comm.backends.shm_cpu import ShmComm
from metainfer.comm.errors import CommError
from metainfer.comm.plan import Offer, choose
from metainfer.comm.request import Op, Request
from metainfer.comm.segment import socket_name

ALGORITHMS = ("one_shot", "two_shot")
SIZES = (2, 6, 14, 30, 510, 4094, 4096, 65_534, 1 << 20, (1 << 20) + 2, 16 << 20)
WRAP = 1 << 40
BAR_S = 3.0
Report = dict[str, Any]


def plan_of(count: int, dtype: str, world: int, algorithm: str) -> Any:
    request = Request(op=Op.ALL_REDUCE, count=count, dtype=dtype, world=world)
    return choose(request, [Offer(backend="shm_cpu", algorithm=algorithm)])


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of many magnitudes [count], a fifth of them special."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator)
    found *= 10.0 ** torch.randint(-4, 4, (count,), generator=generator)
    info, inf = torch.finfo(dtype), float("inf")
    special = torch.tensor([0.0, -0.0, inf, -inf, float("nan"), info.max, info.min, info.tiny / 4])
    where = torch.randint(0, count, (count // 5,), generator=generator)
    found = found.to(dtype)
    found[where] = special.to(dtype)[
        torch.randint(0, len(special), (count // 5,), generator=generator)
    ]
    return found


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """In float32, in rank order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit; of NaN only that it is one where one is wanted, which has many spellings."""
    kind = torch.int16 if found.element_size() == 2 else torch.int32
    equal = found.view(kind) == want.view(kind)
    return bool((equal | (found.isnan() & want.isnan())).all())


def on_ranks(world: int, step: Callable[[str, int], object]) -> tuple[str, list[Any], list[int]]:
    """`step(token, rank)` in a process each: token, what each found (None of one that died), pids.

    Forked, so that torch is loaded once; each answers by a pipe.
    """
    token = f"bench-{os.getpid()}-{random.randrange(1 << 30)}"
    pipes, pids = [], []
    for rank in range(world):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                found = step(token, rank)
            except BaseException as error:  # noqa: BLE001 - told to the parent
                found = {"bug": f"{type(error).__name__}: {error}"}
            os.write(write, json.dumps(found).encode())
            os._exit(0)
        os.close(write)
        pipes.append(read)
        pids.append(pid)
    found = []
    for read in pipes:
        with open(read, "rb") as pipe:
            text = pipe.read()
        found.append(json.loads(text) if text else None)
    for pid in pids:
        os.waitpid(pid, 0)
    return token, found, pids


def left_of(token: str, pids: list[int]) -> list[str]:
    """Processes of a group that is gone, whose memory goes with them, and its meeting place."""
    left = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    name = socket_name(token).replace("\0", "@")
    return left + [name] * (name in Path("/proc/net/unix").read_text().split())


def exact(world: int, size: int, dtype: str) -> Report:
    """All-reduces of about `size` bytes, by both algorithms."""
    kind: torch.dtype = getattr(torch, dtype)
    count = max(1, size // kind.itemsize)

    def step(token: str, rank: int) -> list[str]:
        given = [values(count, kind, 7919 * each + size) for each in range(world)]
        want = summed(given)
        with ShmComm.open(token, rank, world) as comm:
            return [
                name
                for name in ALGORITHMS
                if not same(comm.run(plan_of(count, dtype, world, name), given[rank]), want)
            ]

    token, found, pids = on_ranks(world, step)
    wrong = [f"rank {rank}: {each}" for rank, each in enumerate(found) if each != []]
    return {"count": count, "wrong": wrong + left_of(token, pids)}


def calls(world: int, total: int) -> Report:
    """`total` calls across the wrap, one rank late now and then."""
    sizes = (1, 33, 2048)
    given = {n: [values(n, torch.bfloat16, 31 * each + n) for each in range(world)] for n in sizes}
    want = {n: summed(parts) for n, parts in given.items()}
    plans = {(n, a): plan_of(n, "bfloat16", world, a) for n in sizes for a in ALGORITHMS}

    def step(token: str, rank: int) -> int:
        order, waits, wrong = random.Random(1), random.Random(rank), 0
        with ShmComm.open(token, rank, world, first_call=WRAP - total // 2) as comm:
            for _ in range(total):
                key = order.choice(sizes), order.choice(ALGORITHMS)
                if waits.random() < 0.01:
                    time.sleep(waits.random() * 2e-4)
                wrong += not same(comm.run(plans[key], given[key[0]][rank]), want[key[0]])
        return wrong

    begin = time.monotonic()
    token, found, pids = on_ranks(world, step)
    wrong = [f"rank {rank}: {each}" for rank, each in enumerate(found) if each != 0]
    seconds = round(time.monotonic() - begin, 1)
    return {"calls": total, "s": seconds, "wrong": wrong + left_of(token, pids)}


def killed(world: int, seed: int) -> Report:
    """The last rank ends itself by SIGKILL at a random moment of a call's life."""
    plan = plan_of(4096, "bfloat16", world, ALGORITHMS[seed % 2])
    given = torch.ones(4096, dtype=torch.bfloat16)

    def step(token: str, rank: int) -> Report:
        with ShmComm.open(token, rank, world, budget_s=3600.0) as comm:
            comm.run(plan, given)
            if rank == world - 1:
                wait = random.Random(seed).random() * 0.05
                pid = os.getpid()
                if os.fork() == 0:  # strikes from outside, wherever the rank is then
                    time.sleep(wait)
                    os.kill(pid, signal.SIGKILL)
                    os._exit(0)
            try:
                while True:
                    last = time.monotonic()
                    comm.run(plan, given)
            except CommError as error:
                return {"peer": error.peer, "s": time.monotonic() - last}

    token, found, pids = on_ranks(world, step)
    others = found[:-1]
    wrong = [f"rank {rank}: {each}" for rank, each in enumerate(others)
             if each is None or each.get("peer") != world - 1]  # fmt: skip
    slowest = max((each.get("s", 0.0) for each in others if each), default=0.0)
    if slowest > BAR_S:
        wrong.append(f"{slowest:.1f} s until the last one knew")
    return {"slowest_s": slowest, "wrong": wrong + left_of(token, pids)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--world", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--largest", type=int, default=64 << 20, help="bytes")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20, help="of each number of ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report: Report = {"exact": [], "calls": [], "killed": []}
    conditions = surroundings() | {"command": " ".join(["python", *sys.argv])}
    report = {"conditions": conditions, "cpus": os.cpu_count(), **report}

    def keep(part: str, row: Report) -> None:
        report[part].append(row)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")

    for world in args.world:
        for seed in range(args.kills):
            keep("killed", {"world": world, "seed": seed, **killed(world, seed)})
    for world in args.world:
        for dtype in ("bfloat16", "float16", "float32"):
            for size in [each for each in (*SIZES, args.largest) if each <= args.largest]:
                row = {"world": world, "dtype": dtype, "bytes": size, **exact(world, size, dtype)}
                keep("exact", row)
    keep("calls", {"world": 2, **calls(2, args.calls)})
    wrong = [row for part in ("exact", "calls", "killed") for row in report[part] if row["wrong"]]
    if not args.out:
        print(json.dumps(report, indent=1))
    print(json.dumps(wrong) if wrong else "nothing wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
