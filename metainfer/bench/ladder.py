"""`bench ladder`: what each measure is worth, from a stock engine's way of working to ours.

Rung by rung the holds of a named baseline (`profiles`) are taken away: cumulative in their order,
then each alone from the finished engine (leave-one-out), then both ends once more beside each
other. Two engines are alive at a time and take turns, so every gain is a ratio of neighbours in
time; an engine is timed only after its log-probabilities agree with the baseline's.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metainfer.bench.conditions import conditions
from metainfer.bench.offline import EngineSide, drawn_prompts
from metainfer.bench.profiles import DAY_0, Rung, climbable, holding
from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.plan import Plan
from metainfer.engine.engine import Engine
from metainfer.engine.machine import open_machine
from metainfer.planner.opening import open_model

BARS = {"float64": 1e-6, "float32": 1e-3}
"""Largest difference of a log-probability from the baseline's; in half precision the mean of all
differences is held to `HALF_MEAN` nats instead."""
HALF_MEAN = 0.1
RANDOM_PART = 0.5
"""With random weights, the mean of all differences in half precision over the mean distance of the
baseline's log-probabilities from their mean; unrelated ones are at 1.4. No token stands out there,
and a last bit before a rounding to FP8 is a step behind it (0.18 nats after four layers)."""
RESAMPLES = 2000
TWO_ENGINES = 0.45
"""Part of a device's memory that each of two living engines may take, where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderOptions:
    """Tokens per request, requests at once, and turns of each pair."""

    prompt_tokens: int = 64
    output_tokens: int = 48
    batches: tuple[int, ...] = (1, 8)
    prefill_tokens: int = 1000
    repeats: int = 7
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One row of work: `count` prompts of `prompt` tokens, `output` tokens each (1: prefill)."""

    name: str
    count: int
    prompt: int
    output: int

    def rate(self, side: EngineSide, prompts: Sequence[Sequence[int]]) -> float:
        """Tokens per second of the part that the load is about."""
        prefill, decode = side.generate(prompts, self.output)
        if self.output == 1:
            return self.count * self.prompt / prefill
        return self.count * (self.output - 1) / decode


def run(intent: Intent, options: LadderOptions, log: Callable[[str], None]) -> dict[str, Any]:
    """Climb; returns ``{"profile", "rungs", "absent", "total", "verification", "conditions"}``.

    A gain is a ratio of rates with a bootstrap interval of 95 % over the turns' ratios.

    Raises:
        RefusedError: an engine's log-probabilities are not the baseline's; nothing of it was timed.
        UsageError: no baseline is described for this kind of device, or no rung stands on it.
    """
    return _Ladder(_prepared(intent, options), options, log).climb()


def _prepared(intent: Intent, options: LadderOptions) -> Intent:
    """Room for the longest row and no more, so that two engines fit beside each other."""
    longest = max(options.prompt_tokens + options.output_tokens, options.prefill_tokens + 1)
    wanted: dict[str, Any] = {"context": longest, "concurrency": max(options.batches)}
    wanted = {name: value for name, value in wanted.items() if getattr(intent, name) is None}
    if intent.memory_share is None and intent.kv_bytes is None:
        wanted["memory_share"] = TWO_ENGINES
    wanted["prefix_cache"] = False
    origins = {**dict.fromkeys(wanted, Origin.DERIVED), **intent.origins}
    return replace(intent, **wanted, origins=origins)


class _Ladder:
    def __init__(self, intent: Intent, options: LadderOptions, log: Callable[[str], None]) -> None:
        self.intent, self.options, self.log = intent, options, log
        self.loads = [
            Load(
                name=f"decode, batch {batch}",
                count=batch,
                prompt=options.prompt_tokens,
                output=options.output_tokens,
            )
            for batch in options.batches
        ]
        if options.prefill_tokens:
            tokens = options.prefill_tokens
            self.loads.append(
                Load(name=f"prefill, {tokens} tokens", count=1, prompt=tokens, output=1)
            )
        self.living: list[EngineSide] = []
        self.truth: list[float] = []
        self.checked: list[dict[str, object]] = []
        self.turn = 0

    def climb(self) -> dict[str, Any]:
        plan, every = self.footing()
        rungs = [rung for rung in every if not rung.absent]
        if not rungs:
            why = "; ".join(f"{rung.name}: {rung.absent}" for rung in every)
            raise UsageError(
                f"no rung of the day-0 profile stands here ({why}).",
                "Take a model and a machine on which one of its measures works.",
            )
        rows: list[dict[str, Any]] = [
            {"rung": rung.name, "stock": rung.stock, "held": _held(rung)} for rung in rungs
        ]
        try:
            lower = self.start(rungs)
            for place, row in enumerate(rows, 1):
                upper = self.start(rungs[place:])
                row["cumulative"] = self.pair(lower, upper, row["rung"])
                self.close(lower)
                lower = upper
            for rung, row in zip(rungs, rows, strict=True):
                if rung is rungs[-1]:
                    row["left_out"] = row["cumulative"]  # the same two engines
                    break
                without = self.start([rung])
                row["left_out"] = self.pair(without, lower, f"{rung.name}, left out")
                self.close(without)
            total = self.pair(self.start(rungs), lower, "all of them")
        finally:
            for side in list(self.living):
                self.close(side)
        return {
            "profile": "day-0",
            "model": self.intent.model,
            "rungs": rows,
            "absent": [{"rung": r.name, "why": r.absent} for r in every if r.absent],
            "total": total,
            "verification": self.checked,
            "conditions": conditions(plan),
        }

    def footing(self) -> tuple[Plan, list[Rung]]:
        """The finished engine's plan, and which rungs stand on it."""
        machine = open_machine(self.intent.platform)
        model = open_model(self.intent.model, adapters=self.intent.adapters)
        machine.recall(machine.resolve(model, self.intent).plan.model.dtype)
        resolved = machine.resolve_proven(model, self.intent, lambda progress: None)
        kind = machine.facts.device.kind
        if kind not in DAY_0:
            known = ", ".join(DAY_0)
            raise UsageError(
                f"no day-0 profile is described for {kind}, only for {known}.",
                "Measure one engine with bench offline instead.",
            )
        return resolved.plan, climbable(DAY_0[kind], resolved.plan)

    def start(self, held: Sequence[Rung]) -> EngineSide:
        """An engine with these holds; its log-probabilities are checked before it is timed."""
        names = ", ".join(rung.name for rung in held) or "nothing"
        self.log(f"starting the engine without: {names}")
        engine = Engine(holding(self.intent, held), lambda progress: None)
        info = engine.start()
        side = EngineSide(engine, info.vocab_size)
        self.living.append(side)
        assert engine.resolved is not None
        tokens = min(200, info.max_context - 1)
        prompt = drawn_prompts(1, tokens, info.vocab_size, self.options.seed + 999)[0]
        self.check(side.logprobs(prompt), engine.resolved.plan.model.dtype, names)
        return side

    def check(self, found: Sequence[float], dtype: str, names: str) -> None:
        self.truth = self.truth or list(found)
        gaps = [abs(a - b) for a, b in zip(found, self.truth, strict=True)]
        worst, mean = max(gaps), statistics.fmean(gaps)
        bar = BARS[dtype] if dtype in BARS else self.half_bar()
        self.checked.append({"without": names, "worst": worst, "mean": mean, "bar": bar})
        fine = (worst if dtype in BARS else mean) <= bar
        if not fine:  # NaN compares as false
            raise RefusedError(
                f"the engine without {names} answers otherwise than the baseline: its "
                f"log-probabilities differ by {worst:.2e}, on average {mean:.2e}.",
                "Nothing of it was timed; run `metainfer verify`.",
                code="not_verified",
            )

    def half_bar(self) -> float:
        if not self.intent.model.startswith("random:"):
            return HALF_MEAN
        middle = statistics.fmean(self.truth)
        return max(HALF_MEAN, RANDOM_PART * statistics.fmean(abs(x - middle) for x in self.truth))

    def close(self, side: EngineSide) -> None:
        self.living.remove(side)
        side.engine.close()

    def pair(self, lower: EngineSide, upper: EngineSide, title: str) -> list[dict[str, Any]]:
        """Both engines by turns, the order drawn anew; the first turn warms up."""
        self.log(f"measuring: {title}")
        source = random.Random(f"{self.options.seed} {title}")
        rows = []
        for load in self.loads:
            rates: dict[str, list[float]] = {"before": [], "after": []}
            for turn in range(self.options.repeats + 1):
                self.turn += 1
                prompts = drawn_prompts(load.count, load.prompt, upper.vocab, self.turn)
                sides = [("before", lower), ("after", upper)]
                source.shuffle(sides)
                for name, side in sides:
                    rate = load.rate(side, prompts)
                    if turn:
                        rates[name].append(rate)
            rows.append(gain_row(load.name, rates["before"], rates["after"]))
            self.log(f"  {load.name}: {_gain(rows[-1])}")
        return rows


def gain_row(name: str, before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Rates of two sides turn by turn, the median of their ratios, its 95 % interval."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    source = random.Random(0)
    medians = sorted(
        statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return {
        "load": name,
        "unit": "tokens/s",
        "before": statistics.median(before),
        "after": statistics.median(after),
        "gain": statistics.median(ratios),
        "interval": [medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]],
        "n": len(ratios),
        "pairs": [list(pair) for pair in zip(before, after, strict=True)],
    }


def _held(rung: Rung) -> list[str]:
    """The hold in the words of the command line."""
    words = [f"--op {op}={impl}" for op, impl in rung.ops.items()]
    words += [f"--layout {role}={layout}" for role, layout in rung.layouts.items()]
    return words + [f"--{name.replace('_', '-')} {value}" for name, value in rung.settings.items()]


def text(document: dict[str, Any]) -> str:
    """The ladder as a table: a block per load, a line per rung."""
    lines = [f"{document['model']}, from the {document['profile']} profile; gain [95 %], n turns"]
    for place, whole in enumerate(document["total"]):
        lines.append(f"\n{whole['load']} ({whole['unit']})")
        for row in document["rungs"]:
            up, out = row["cumulative"][place], row["left_out"][place]
            lines.append(
                f"  {row['rung']:<24} {up['before']:>9.1f} -> {up['after']:>9.1f}  "
                f"{_gain(up)}   left out {_gain(out)}"
            )
        lines.append(
            f"  {'all of them':<24} {whole['before']:>9.1f} -> {whole['after']:>9.1f}  "
            f"{_gain(whole)}"
        )
    lines += [f"not a rung: {row['rung']}: {row['why']}" for row in document["absent"]]
    return "\n".join(lines)


def _gain(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['gain']:.2f}x [{low:.2f}, {high:.2f}] n {row['n']}"
