"""Drafts from tokens seen before, on real text: are answers the same, what is gained by class.

    python benchmarks/drafts.py [--model smollm2-135m] [--tokens 96] [--repeats 3] [--out FILE]

Answers with drafts off, at a fixed depth and at the depth that gain chooses, from engines that
take turns in one process; greedy, and one class drawn at temperature 1 with a seed. An answer that
differs ends the run. A class is a kind of text; its gain is the ratio of decode times in the same
turn, by median, with its range. On a busy machine these ratios say little; `modelled` prices the
rows of the very same steps by what rows cost on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from metainfer.bench.conditions import conditions
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.core.step import Phase, StepPlan
from metainfer.engine.engine import Engine
from metainfer.engine.model_text import load_text
from metainfer.planner.opening import open_model

MODES = {"off": "off", "ngram:4": "ngram:4", "auto": "auto"}
RECORDS = "\n".join(
    f'{{"id": {i}, "city": "{city}", "country": "{country}", "open": true}}'
    for i, (city, country) in enumerate(
        [("Lisbon", "Portugal"), ("Oslo", "Norway"), ("Turin", "Italy"), ("Ghent", "Belgium")]
    )
)
TEXTS = {
    "records": (RECORDS + '\n{"id": 4,', RECORDS.replace("city", "town") + '\n{"id": 4,'),
    "code": (
        "def area(width, height):\n    return width * height\n\n\n"
        "def volume(width, height, depth):\n    return width * height * depth\n\n\n"
        "def surface(width, height, depth):\n",
        "for name in names:\n    print(name)\n\nfor city in cities:\n    print(city)\n\n"
        "for street in",
    ),
    "prose": (
        "The harbour was quiet that morning. Two boats lay at the pier, and an old man mended nets "
        "while the gulls waited. He had been a sailor once, and",
        "Plants need light, water and minerals. In a dry summer the roots of a tree reach deeper, "
        "and its leaves",
    ),
}


ROW = 0.295
"""A further row of a step over the first one: 9.1 ms for 1 sequence and 27.9 for 8, in the record
2026-11-29-cpu-offline-smollm2."""

DRAWN = "prose, drawn"
"""The class whose answers wander: little of them was seen before."""


def prompts(model: str) -> dict[str, list[tuple[int, ...]]]:
    """Ids by class; random ids are a class of their own, in which little repeats."""
    import random

    tokenizer = load_text(model, open_model(model).arch.vocab_size).tokenizer
    found = {
        name: [tuple(tokenizer.encode(text, False)) for text in texts]
        for name, texts in TEXTS.items()
    }
    found[DRAWN] = found["prose"]
    source = random.Random(5)
    found["random ids"] = [tuple(source.choices(range(100, 40_000), k=60)) for _ in range(2)]
    return found


class Side:
    """One engine and its setting."""

    def __init__(self, model: str, draft: str) -> None:
        intent = Intent(model=model, draft=draft, context=2048, concurrency=4, prefix_cache=False)
        self.engine = Engine(intent, lambda progress: None)
        self.engine.start()
        self.engine.on_step = self._note
        self._count = 0
        self.cost = 0.0  # of decoding steps, in steps of one row

    def _note(self, plan: StepPlan, seconds: float) -> None:
        if all(segment.phase in (Phase.DECODE, Phase.VERIFY) for segment in plan.segments):
            self.cost += 1 + ROW * (plan.tokens - 1)

    def answer(
        self, prompt: tuple[int, ...], tokens: int, drawn: bool
    ) -> tuple[list[int], float, int]:
        """Ids, seconds from the first token to the last, and steps."""
        self._count += 1
        params = SamplingParams(
            temperature=float(drawn), seed=7, max_tokens=tokens, ignore_eos=True
        )
        self.engine.submit(Request(f"drafts-{self._count}", prompt, params))
        found: list[int] = []
        first, steps = 0.0, 0
        while self.engine.has_work:
            outputs, _ = self.engine.step()
            steps += bool(found)
            for output in outputs:
                found += output.tokens
            first = first or (time.perf_counter() if found else 0.0)
        return found, time.perf_counter() - first, steps


def measure(args: argparse.Namespace) -> dict[str, object]:
    texts = {k: v for k, v in prompts(args.model).items() if not args.only or k in args.only}
    sides = {name: Side(args.model, draft) for name, draft in MODES.items()}
    times: dict[tuple[str, str], list[float]] = {}
    steps: dict[tuple[str, str], int] = {}
    costs: dict[tuple[str, str], float] = {}
    for turn in range(args.repeats + 1):
        for kind, several in texts.items():
            answers: dict[str, list[list[int]]] = {}
            for name, side in sides.items():
                spent, count, side.cost = 0.0, 0, 0.0
                for prompt in several:
                    ids, seconds, forwards = side.answer(prompt, args.tokens, kind == DRAWN)
                    answers.setdefault(name, []).append(ids)
                    spent, count = spent + seconds, count + forwards
                if turn:  # the first turn warms up, and lets the controller look around
                    times.setdefault((kind, name), []).append(spent)
                    steps[kind, name] = count
                    costs[kind, name] = costs.get((kind, name), 0.0) + side.cost
            for name, found in answers.items():
                if found != answers["off"]:
                    raise SystemExit(f"{kind}: drafts {name} changed an answer")
        print(f"turn {turn} of {args.repeats}", file=sys.stderr, flush=True)
    tokens = (args.tokens - 1) * 2
    rows = []
    for kind in texts:
        for name in MODES:
            pairs = zip(times[kind, "off"], times[kind, name], strict=True)
            gains = [off / mine for off, mine in pairs]
            rows.append(
                {
                    "class": kind,
                    "draft": name,
                    "tok_s": tokens / statistics.median(times[kind, name]),
                    "gain": statistics.median(gains),
                    "gain_range": [min(gains), max(gains)],
                    "modelled": costs[kind, "off"] / costs[kind, name],
                    "tokens_per_forward": tokens / steps[kind, name],
                    "n": len(gains),
                }
            )
    resolved = sides["auto"].engine.resolved
    assert resolved is not None
    told = conditions(resolved.plan) | {"text_class": "by row", "tokens": args.tokens}
    last = sides["auto"].engine.stats()
    for side in sides.values():
        side.engine.close()
    return {
        "rows": rows,
        "last_depth": last.draft_depth,
        "alarm": last.draft_alarm,
        "conditions": told,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", help="a class (repeatable)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    document = measure(args)
    for row in document["rows"]:  # type: ignore[attr-defined]
        print(
            f"{row['class']:<13} {row['draft']:<8} {row['tok_s']:>7.1f} tok/s  "
            f"gain {row['gain']:.2f} ({row['gain_range'][0]:.2f} to {row['gain_range'][1]:.2f})  "
            f"modelled {row['modelled']:.2f}  {row['tokens_per_forward']:.2f} tokens a forward"
        )
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
