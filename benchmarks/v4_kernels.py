"""DeepSeek-V4's hard kernels on one card: checked against float64 first, then timed in graphs.

    python benchmarks/v4_kernels.py --out FOLDER [--sweep] [--only linear,experts,...]

Every kernel's result is compared with the recipe computed in float64 (fresh inputs, outputs
poisoned); a row is timed only when it passes. Times are medians of graph replays, several calls a
graph over rotated weights so that nothing is read from the cache; limits count each input once at
the read rate and matrix rates measured in the same run. ``--sweep`` tries other tiles. Writes
``v4_kernels.json``; exit status 1 when a check fails. ``--compile I/N`` only builds kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from v4_attention_cases import SECTIONS as ATTENTION
from v4_block_cases import SECTIONS as BLOCKS
from v4_cases import SECTIONS as PRODUCTS
from v4_cases import Work
from v4_choice_cases import SECTIONS as CHOICES

from metainfer.ops.case import poisoned

SECTIONS = {**PRODUCTS, **ATTENTION, **BLOCKS, **CHOICES}


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int = 15) -> tuple[float, float]:
    """(median, MAD) seconds of one call, from replays of a graph that holds all of `calls`."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    seconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / len(calls))
    median = statistics.median(seconds)
    return median, statistics.median(abs(s - median) for s in seconds)


def eager_seconds(call: Callable[[], object], repeats: int = 9) -> float:
    """Median seconds between events around one call."""
    call()
    seconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def ceilings() -> dict[str, float]:
    """Copy rate (bytes read and written), bf16 and FP8 matrix rates, on random data."""
    a = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    copy = 2 * a.nbytes / eager_seconds(lambda: b.copy_(a))
    del a, b
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    work = 2 * 8192**3
    bf16 = work / graph_seconds([lambda: a @ b], 7)[0]
    rates = {"copy_bytes_s": copy, "bf16_flops": bf16}
    if torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device="cuda")
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        rates["fp8_flops"] = (
            work
            / graph_seconds(
                [lambda: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16)], 7
            )[0]
        )
    print({key: f"{value / 1e12:.2f}e12" for key, value in rates.items()}, flush=True)
    return rates


def judge(work: Work) -> tuple[float, float]:
    """(error of the kernel, error of the recipe) against the truth, both relative, rms."""
    with poisoned():
        mine = work.call(0)
    torch.cuda.synchronize()
    truth, recipe = work.truth()

    if isinstance(mine, tuple):  # several results of a row, side by side
        mine = torch.cat([part.double() for part in mine], dim=1)

    def off(value: torch.Tensor) -> float:
        gap = value[: len(truth)].double() - truth
        return float(gap.norm() / truth.norm()) if bool(torch.isfinite(gap).all()) else float("inf")

    return off(mine), off(recipe)


def run(work: Work, rates: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": work.name, "variant": work.variant}
    try:
        row["error"], row["recipe_error"] = judge(work)
        row["passed"] = row["error"] <= max(1.25 * row["recipe_error"], work.floor)
        if row["passed"]:
            calls = [lambda i=i: work.call(i) for i in range(work.copies)]
            row["median_s"], row["mad_s"] = graph_seconds(calls)
            memory = work.bytes / rates["copy_bytes_s"]
            compute = work.flops / rates[work.rate]
            row |= {"bytes": work.bytes, "flops": work.flops, "limit_s": max(memory, compute)}
            row["bound"] = "bytes" if memory >= compute else work.rate
            row["share_of_limit"] = row["limit_s"] / row["median_s"]
    except Exception as error:  # noqa: BLE001 - a kernel that cannot be built is a row too
        row |= {"passed": False, "raised": f"{type(error).__name__}: {str(error)[-300:]}"}
    text = (
        f"{row['median_s'] * 1e6:9.1f} us (mad {row['mad_s'] * 1e6:.1f})  "
        f"{row['share_of_limit']:4.0%} of {row['bound']}  "
        f"{work.bytes / row['median_s'] / 1e12:5.2f} TB/s "
        f"{work.flops / row['median_s'] / 1e12:6.0f} TFLOP/s"
        if "median_s" in row
        else f"FAILED {row.get('raised', '')}"
    )
    print(f"{work.name:34s} {work.variant:28s} {text}  err {row.get('error', -1):.1e}"
          f"/{row.get('recipe_error', -1):.1e}", flush=True)  # fmt: skip
    return row


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", default="")
    arguments = parser.parse_args()
    part, _, parts = arguments.compile.partition("/")
    begin = time.perf_counter()
    rates = {} if part else ceilings()
    rows = []
    place = 0
    for section in arguments.only.split(","):
        for work in SECTIONS[section](arguments.sweep):
            place += 1
            if not part:
                rows.append(run(work, rates))
            elif place % int(parts) == int(part):
                try:
                    work.call(0)
                except Exception as error:  # noqa: BLE001 - reported by the timed run
                    print(f"{work.name} {work.variant}: {str(error)[-200:]}")
    if part:
        return 0
    import triton

    failed = [row for row in rows if not row["passed"]]
    report = {
        "device": torch.cuda.get_device_name(),
        "software": {"torch": torch.__version__, "triton": triton.__version__},
        "command": " ".join(sys.argv),
        "seconds": time.perf_counter() - begin,
        "ceilings": rates,
        "rows": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "v4_kernels.json").write_text(json.dumps(report, indent=1))
    print(f"{len(rows)} rows, {len(failed)} failed, {report['seconds']:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
