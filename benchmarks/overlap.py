"""What is gained inside a step by computing beside something else: pairs in random order.

    python benchmarks/overlap.py --out FOLDER [--parallel tp2 --collectives host] [--pairs 36]
        [--model random:deepseek-v4-flash?layers=12] [--platform cuda] [--decode 1 8 32]
        [--prefill 2048 8192] [--arms turns "pieces 4" ...] [--seconds 90]

One process on one card, or ranks on a card each. Every row compares an arm with ``off``, on the
same inputs in the same process, `--pairs` times; who goes first is drawn for each pair. Arms:

* ``shared first``, ``routed first``: the shared expert on a stream of its own beside the routed
  ones, its kernels launched before or behind theirs: captured decode steps and chunks, over ranks
  with their sums; not where domains meet at the experts;
* ``turns``: over ranks, the halves of a chunk in turns, the collectives of one beside the other's
  products; ``halves``: the same halves without turns, which says what cutting costs;
  Where ranks share the rows of a chunk ``beside`` is the whole of it, its gathers on their way
  beside what does not need them;
* ``pieces N``: a chunk whose products over ranks are summed in N pieces of its rows, the sum of one
  beside the product of the next.

Seconds of a pass are those of the slowest rank. ``overlap.json`` is written after every row, with
all pairs; a gain is the median of off / arm, with a bootstrap interval of 95 %. Results of arms are
compared with ``off`` bit by bit, those of ``turns`` with ``halves``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpu_check import submit

from metainfer.core.intent import Intent
from metainfer.core.plan import LayoutPlan
from metainfer.engine import devices
from metainfer.engine.engine import Engine

NEVER = 1 << 30
"""A bound that no chunk reaches: streams are there, and the engine's own steps do not use them."""


def started(args: argparse.Namespace) -> Engine:
    over_ranks: dict[str, Any] = {}
    if args.parallel:
        devices.RANK = "overlap_rank:TimedRank"
        paths = (sys.path[0], os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        over_ranks = {"parallel": args.parallel, "halves": NEVER if args.prefill else None}
        if args.platform != "cpu":
            over_ranks["collectives"] = args.collectives
    engine = Engine(
        Intent(
            model=args.model,
            platform=args.platform,
            context=max([*args.prefill, 1024]) + 64,
            chunk_tokens=max(args.prefill, default=2048),
            concurrency=max(args.decode, default=1),
            prefix_cache=False,
            **over_ranks,
        ),
        lambda p: print(f"  {p.phase} {p.seconds:.1f} s", flush=True) if p.seconds else None,
    )
    engine.start()
    return engine


class Ranks:
    """The ranks' timers: of other processes, or the one here."""

    def __init__(self, engine: Engine) -> None:
        executor: Any = engine._executor
        self._group = getattr(executor, "_group", None)
        if self._group is None:
            from overlap_rank import Timer

            self._timer = Timer(executor)

    def call(self, method: str, *arguments: object) -> list[Any]:
        if self._group is None:
            return [getattr(self._timer, method)(*arguments)]
        return self._group.call(method, *arguments)


def arms_of(phase: str, layout: LayoutPlan, wanted: list[str] | None) -> list[str]:
    """What can be compared of such a step, of it what is `wanted`."""
    domains = layout.expert > layout.tensor
    found = [] if domains else ["shared first", "routed first"]
    if phase == "chunk" and layout.prefill > 1:
        found = ["turns", "beside", "halves"]
    elif phase == "chunk" and layout.ranks > 1:
        pieces = ["pieces 4", "pieces 2"] if layout.tensor > 1 and not domains else []
        found = ["turns", *pieces, *found, "halves"]
    return [arm for arm in found if wanted is None or arm in wanted]


def measured(
    engine: Engine, ranks: Ranks, phase: str, size: int, args: argparse.Namespace
) -> list[Any]:
    """Arm the timers, bring the engine to a step of that size, and take what they measured."""
    assert engine.resolved is not None
    plan = engine.resolved.plan
    arms, seed = arms_of(phase, plan.layouts[0], args.arms), random.randrange(1 << 30)
    if not arms:
        return []
    ranks.call("arm", phase, size, arms, args.pairs, seed)
    if phase == "chunk":
        submit(engine, 1, size, 1)
    else:
        mixed = plan.limits.mixed_prefill_tokens
        submit(engine, size, args.context, 8 + size * args.context // mixed)
    while engine.has_work:
        engine.step()
    every = ranks.call("taken")
    return [judged(phase, size, arm, [rank[arm] for rank in every]) for arm in arms]


def judged(phase: str, size: int, arm: str, every: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of what each rank measured: `pairs` of (off, arm) seconds, the slowest rank's."""
    pairs = [
        [max(times) for times in zip(*both, strict=True)]
        for both in zip(*(each["pairs"] for each in every), strict=True)
    ]
    ratios = [off / on for off, on in pairs]
    low, high = bootstrap(ratios)
    first = [
        ratio for ratio, goes_first in zip(ratios, every[0]["first"], strict=True) if goes_first
    ]
    return {
        "row": f"{phase}, {size}: {arm}",
        "off_ms": statistics.median(off for off, _ in pairs) * 1e3,
        "arm_ms": statistics.median(on for _, on in pairs) * 1e3,
        "gain": statistics.median(ratios),
        "interval": [low, high],
        "gain_where_the_arm_went_first": statistics.median(first) if first else None,
        "n": len(pairs),
        "equal": all(each["equal"] for each in every),
        "pairs_s": pairs,
        "arm_first": every[0]["first"],
    }


def bootstrap(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of their median."""
    rng = random.Random(0)
    found = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return found[draws * 25 // 1000], found[draws * 975 // 1000]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="random:deepseek-v4-flash?layers=12")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--parallel")
    parser.add_argument("--collectives", default="host")
    parser.add_argument("--pairs", type=int, default=36)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192, 2048])
    parser.add_argument("--arms", nargs="*", help="these alone")
    parser.add_argument("--context", type=int, default=512, help="of decoding requests")
    parser.add_argument("--seconds", type=float, default=90)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    report: dict[str, Any] = {"command": " ".join(sys.argv), "rows": []}
    engine = started(args)
    ranks = Ranks(engine)
    for phase, size in [("decode", n) for n in args.decode] + [("chunk", n) for n in args.prefill]:
        if time.monotonic() > end:
            report["rows"].append({"row": f"{phase}, {size}", "skipped": "no time left"})
            continue
        for row in measured(engine, ranks, phase, size, args):
            report["rows"].append(row)
            print(json.dumps({k: v for k, v in row.items() if k not in ("pairs_s", "arm_first")}))
        (args.out / "overlap.json").write_text(json.dumps(report, indent=1))
    (args.out / "overlap.json").write_text(json.dumps(report, indent=1))
    engine.close()
    return 0 if all(row.get("equal", True) for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
