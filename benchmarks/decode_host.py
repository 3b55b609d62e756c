"""Host work of one decode step, all of it, with N running requests: the device does nothing.

    python benchmarks/decode_host.py [--running 1,32,128] [--steps 200] [--model random:tiny-llama]
        [--sampled] [--no-overlap] [--profile]

An engine of a tiny model on the CPU, whose captured steps are replaced by nothing: what is left is
scheduling, the plan, the numbers for the device, the sampler's call, reading, committing, outputs.
Prints one line per N: median and median absolute deviation in microseconds of a turn. ``--profile``
prints where the time goes, by function.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from typing import Any

from metainfer.core.intent import Intent
from metainfer.core.plan import StepGraph
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine
from metainfer.executor.graphs import StaticOutput, StaticSteps, Step
from metainfer.executor.static import DeviceTables
from metainfer.ops.sample.inputs import SampleOutput


class Nothing:
    """A replay that leaves what the capture left."""

    def replay(self) -> None: ...


def capture(step: Step) -> tuple[Nothing, StaticOutput]:
    import torch

    out = step()
    rows = out.logits.shape[0]
    tokens = torch.full((rows,), 7)
    out.best = SampleOutput(tokens=tokens, bad=torch.zeros(rows, dtype=torch.bool))
    return Nothing(), out


def started(model: str, running: int, overlap: bool) -> Engine:
    """An engine whose decode steps are replayed as nothing."""
    from dataclasses import replace

    engine = Engine(
        Intent(model=model, threads=1, concurrency=running, context=512, prefix_cache=False)
    )
    engine.start()
    executor: Any = engine._executor
    shape = StepGraph(phase="decode", tokens=running, runs=running)
    executor._parts = replace(executor._parts, graphs=(shape,), overlap=overlap)
    executor._tables = DeviceTables(executor._slots, executor._parts.device)
    executor._static = StaticSteps(executor._parts, executor._tables, capture)
    executor._static.capture(shape)
    assert engine._steps is not None
    engine._steps._ahead = executor if overlap else None
    return engine


def turns(engine: Engine, running: int, steps: int, sampled: bool) -> list[float]:
    """Seconds of each turn while `running` requests decode."""
    for number in range(running):
        params = SamplingParams(
            temperature=0.8 if sampled else 0.0, seed=number, max_tokens=420, ignore_eos=True
        )
        prompt = tuple((7 * number + at) % 200 + 3 for at in range(9 + number % 64))
        engine.submit(Request(f"r{number}", prompt, params))
    while True:
        outputs, _ = engine.step()
        if sum(len(output.tokens) for output in outputs) == running:
            break
    gc.collect()
    gc.freeze()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        outputs, _ = engine.step()
        seconds.append(time.perf_counter() - begin)
        assert len(outputs) == running
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", default="1,32,128")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", default="random:tiny-llama")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print(f"{'running':>8} {'median us':>10} {'mad us':>8}")
    for running in map(int, args.running.split(",")):
        engine = started(args.model, running, not args.no_overlap)
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        times = turns(engine, running, args.steps, args.sampled)
        profile.disable()
        median = statistics.median(times)
        mad = statistics.median(abs(t - median) for t in times)
        print(f"{running:>8} {median * 1e6:>10.1f} {mad * 1e6:>8.1f}")
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        engine.close()


if __name__ == "__main__":
    main()
