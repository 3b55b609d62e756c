"""The protocol on a card: 100,000 calls with delays and the wrap; a section of `comm_gpu.py`."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from comm_gpu_rank import message, values

from metainfer.comm.backends.cuda import CudaLocalGroup
from metainfer.comm.exact import canonical_sum

WRAP = 1 << 40
WORLD, CALLS, GRAPHS, SIZES = 4, 100, 10, (2, 66, 8192, 65_536)
LONGEST_DELAY = 200_000
"""Clocks of the card, about 0.1 ms."""


def soak(total: int = 100_000) -> dict[str, Any]:
    """All-reduces of four virtual ranks in graphs of `CALLS` calls: sizes, algorithms and which
    rank is late are drawn for each graph, and the order of graphs. Every rank compares every result
    with the canonical sum, bit by bit, on the card; the call counter wraps in the middle."""
    rng = random.Random(5)
    parts = {size: [values(rank, size // 2, size) for rank in range(WORLD)] for size in SIZES}
    given = {size: [part.cuda() for part in found] for size, found in parts.items()}
    want = {size: canonical_sum(found).view(torch.int16).cuda() for size, found in parts.items()}
    first = WRAP - total // 2
    with CudaLocalGroup(WORLD, slot_bytes=1 << 18, first_call=first, budget_s=5.0) as group:
        plans = {
            (size, algorithm): message(size, WORLD, "local", algorithm)
            for size in SIZES
            for algorithm in ("one_shot", "two_shot")
        }
        for plan in plans.values():
            group.warm(plan)
        wrong = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(WORLD)]
        out = [{size: torch.empty_like(given[size][0]) for size in SIZES} for _ in range(WORLD)]
        torch.cuda.synchronize()
        captured = [_captured(group, plans, given, want, out, wrong, rng) for _ in range(GRAPHS)]
        begin = time.monotonic()
        for _ in range(total // CALLS):
            graphs = rng.choice(captured)
            for stream, graph in zip(group.streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for comm in group.ranks:
            comm.check()
        seconds, differ = time.monotonic() - begin, [int(each) for each in wrong]
    said = [f"rank {rank}: {each} calls" for rank, each in enumerate(differ) if each]
    return {"calls": total, "ranks": WORLD, "s": round(seconds, 2), "wrong": said}


def _captured(
    group: CudaLocalGroup,
    plans: dict[tuple[int, str], Any],
    given: dict[int, list[torch.Tensor]],
    want: dict[int, torch.Tensor],
    out: list[dict[int, torch.Tensor]],
    wrong: list[torch.Tensor],
    rng: random.Random,
) -> list[torch.cuda.CUDAGraph]:
    """A graph of each rank: the same calls, delays of its own."""
    order, graphs = [rng.choice(list(plans)) for _ in range(CALLS)], []
    for rank, stream in enumerate(group.streams):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            for size, algorithm in order:
                if rng.random() < 0.02:
                    torch.cuda._sleep(rng.randrange(LONGEST_DELAY))
                found = out[rank][size].fill_(float("nan"))
                group.ranks[rank].run(plans[size, algorithm], given[size][rank], found)
                wrong[rank] += (found.view(torch.int16) != want[size]).any()
    torch.cuda.synchronize()
    return graphs
