"""Time of one `schedule` + `commit` with N running decodes, on the null device without contents.

    python benchmarks/scheduler_step.py [--running 1,64,256,1024] [--steps 400] [--shape dense|v4]

Prints one line per N: median and median absolute deviation in microseconds. Device time and page
contents are left out; page borders (every 64 tokens per sequence) are in.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from metainfer.core.request import Request, SamplingParams
from metainfer.executor.null import NullDevice
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.form import plain
from metainfer.kv.book.manager import KVManager
from metainfer.kv.book.spec import CacheSpec, GroupKind, Rewind, form_groups
from metainfer.scheduler.config import SchedulerConfig
from metainfer.scheduler.scheduler import Scheduler

PAGE = 64
BYTE = plain("bench", 1, "uint8")


def specs(shape: str) -> tuple[CacheSpec, ...]:
    """Cache descriptions: one paged group, or the groups of a compressed hybrid."""
    kv = CacheSpec(layer=0, name="kv", kind=GroupKind.PAGED, form=BYTE)
    if shape == "dense":
        return (kv,)
    return (
        CacheSpec(layer=0, name="csa", kind=GroupKind.PAGED, form=BYTE, tokens_per_entry=4),
        CacheSpec(
            layer=1,
            name="hca",
            kind=GroupKind.PAGED,
            form=BYTE,
            tokens_per_entry=64,
        ),
        CacheSpec(layer=2, name="swa", kind=GroupKind.WINDOW, form=BYTE, window=128),
        CacheSpec(
            layer=3,
            name="online",
            kind=GroupKind.STATE,
            form=BYTE,
            rows=1,
            rewind=Rewind.SNAPSHOT,
        ),
    )


def measure(running: int, steps: int, shape: str) -> list[float]:
    """Seconds of each step while `running` sequences decode."""
    groups = form_groups(specs(shape), page_tokens=PAGE)
    answer = 2 * steps + 1000
    pages = running * ((answer + 2 * PAGE) // PAGE + 2) + 1
    sizes = CacheSizes(
        groups=groups,
        pages=tuple(0 if g.kind is GroupKind.STATE else pages for g in groups),
        snapshots=tuple(256 if g.kind is GroupKind.STATE else 0 for g in groups),
        slots=running,
    )
    config = SchedulerConfig(
        max_context=100_000, max_running=running, step_tokens=max(8192, running), max_waiting=2048
    )
    device = NullDevice(contents=False)
    device.start(sizes)
    scheduler = Scheduler(config, [KVManager(sizes)])
    for i in range(running):
        prompt = tuple(range(i, i + 40 + i % PAGE))
        scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=answer)))
    while not _decoding(scheduler, device, running):
        pass
    times = []
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None and plan.tokens == running
        result = device.execute(plan)
        resume = time.perf_counter()
        scheduler.commit(result)
        times.append(time.perf_counter() - resume + middle - begin)
    return times


def _decoding(scheduler: Scheduler, device: NullDevice, running: int) -> bool:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(device.execute(plan))
    short = [run for s in plan.segments for r in s.ranks for run in r.runs if len(run.tokens) == 1]
    return len(short) == running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", default="1,64,256,1024")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--shape", choices=("dense", "v4"), default="dense")
    args = parser.parse_args()
    print(f"{'running':>8} {'median us':>10} {'mad us':>8} {'p99 us':>8}   ({args.shape})")
    for running in map(int, args.running.split(",")):
        times = measure(running, args.steps, args.shape)
        median = statistics.median(times)
        mad = statistics.median(abs(t - median) for t in times)
        worst = sorted(times)[int(0.99 * (len(times) - 1))]
        print(f"{running:>8} {median * 1e6:>10.1f} {mad * 1e6:>8.1f} {worst * 1e6:>8.1f}")


if __name__ == "__main__":
    main()
