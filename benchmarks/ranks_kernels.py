"""The kernels of dealt heads by their cases, then timed beside torch's form; of `ranks_tokens.py`.

Two ranks of 16 query heads of 128 over one KV head. Seconds are of a call in a replayed graph that
holds three of them over keys of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from sections import Report
from torch import Tensor
from v4_kernels import graph_seconds

from metainfer.engine.machine import open_machine
from metainfer.kernels.impl import Impl
from metainfer.ops.qualify import qualify

RANKS, HEADS, WIDTH, PAGE, COPIES = 2, 8, 128, 8, 3
PARTS = {"cuda": ((8, 8192), (1, 32768), (8, 2048), (32, 2048)), "cpu": ((2, 64),)}
WEIGHED = {"cuda": (1, 8, 32), "cpu": (2,)}
TYPES = {"cuda": ("bfloat16", "float16", "float32"), "cpu": ("float32",)}
CHECKED = ("attn_paged_part", "attn_weigh")


def kernels(platform: str, part: Callable[[str, Callable[[], Report]], None]) -> None:
    machine = open_machine(platform)
    impls = [
        impl
        for op in CHECKED
        for impl in machine.registry.of(op)
        if impl.provider == "torch" or (impl.provider == "triton" and platform == "cuda")
    ]
    for impl in impls:
        part(impl.id, partial(judged, impl, platform, machine))
    for impl in impls:
        part(f"{impl.id}, timed", lambda impl=impl: {"rows": timed(impl, platform)})


def judged(impl: Impl, platform: str, machine: Any) -> Report:
    """Its cases in each type; a type that it does not claim is left out."""
    passed, wrong = [], []
    for dtype in TYPES[platform]:
        verdict = qualify(impl, dtype, platform, machine.facts, machine.registry)
        if verdict.accepted:
            passed.append(dtype)
        elif dtype in impl.dtypes:
            wrong += [f"{dtype}: {reason.message}" for reason in verdict.reasons[:3]]
    return {"passed": passed, "wrong": wrong}


def timed(impl: Impl, platform: str) -> list[Report]:
    run, rows = impl.resolve(), list[Report]()
    if impl.op == "attn_weigh":
        for count in WEIGHED[platform]:
            given = [weighed(count, platform) for _ in range(COPIES)]
            calls = [partial(run, *each, rank=0) for each in given]
            rows.append(_row(f"{impl.id}, {count} rows", calls, platform))
        return rows
    for count, keys in PARTS[platform]:
        given = [paged(count, keys, platform) for _ in range(COPIES)]
        calls = [partial(run, *each, scale=WIDTH**-0.5) for each in given]
        rows.append(_row(f"{impl.id}, {count} x {keys} keys", calls, platform))
    return rows


def _row(name: str, calls: Sequence[Callable[[], object]], platform: str) -> Report:
    median, mad = graph_seconds(calls) if platform == "cuda" else _host_seconds(calls)
    print(f"{name}: {1e6 * median:.1f} us (mad {1e6 * mad:.1f})", flush=True)
    return {"row": name, "median_s": median, "mad_s": mad}


def _host_seconds(calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) / len(calls), 0.0


def paged(rows: int, keys: int, device: str) -> tuple[Tensor, ...]:
    """Arguments of `attn_paged_part`: a query of every head for each of `rows` sequences, `keys`
    keys and values of each on this rank."""
    pages, kind = rows * keys // PAGE, torch.bfloat16
    caches = [torch.randn(pages, PAGE, 1, WIDTH, device=device).to(kind) for _ in range(2)]
    q = torch.randn(rows, RANKS * HEADS, WIDTH, device=device).to(kind)
    table = torch.randperm(pages, device=device).int().view(rows, -1)
    counts = torch.full((rows,), keys, dtype=torch.int64, device=device)
    return q, *caches, table, counts, torch.arange(rows + 1, dtype=torch.int32, device=device)


def weighed(rows: int, device: str) -> tuple[Any, ...]:
    """Arguments of `attn_weigh`: mixes of all ranks' heads over the keys of this one, logarithms of
    all ranks."""
    q = torch.randn(rows, HEADS, WIDTH, device=device).to(torch.bfloat16)
    mixed = torch.randn(rows, RANKS * HEADS, WIDTH, device=device)
    logs = torch.randn(RANKS, rows, RANKS * HEADS, device=device)
    return q, mixed, logs, None, None, torch.arange(rows, device=device)
