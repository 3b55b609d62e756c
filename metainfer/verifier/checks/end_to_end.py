"""The plan against references in float64: teacher-forced on a text and on random tokens.

The bar is the recipe's own distance (every op as the checkpoint's code computes it, in the plan's
type), times 1.25 in the mean. Rows behind a near tie of a router or a selection are left out: they
may read what it wrote. Where a bar is missed, ops are given their references one after the
other, then site by site and call by call; what heals is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metainfer.kernels.table import Trace
from metainfer.verifier.distance import (
    NEAR,
    Distance,
    disagreements,
    distance,
    tolerances,
)
from metainfer.verifier.reference import (
    WIDE,
    Rounded,
    objection,
    recipe_of,
    reference_engine,
    reference_of,
    rounding,
    rounds_any,
    swaps,
)
from metainfer.verifier.rows import FAILED, PASSED, Row, bounded, skipped
from metainfer.verifier.scoring import Scored, Text, flips, score
from metainfer.verifier.subject import Subject
from metainfer.verifier.weights import Weights

CHECK = "end to end"
PROMPT, STEPS = 48, 8
MOST_TIE = 0.5
"""Nats: two tokens further apart than this never count as tied."""
LEAST = 0.25
"""Below that share of rows without near ties, all rows count, on both sides."""


@dataclass(slots=True)
class _Run:
    """One text on all sides."""

    text: Text
    truth: Scored
    recipe: Scored
    candidate: Scored

    grade: str

    def rows(self) -> tuple[int, int]:
        """How many rows count, and how many choices are wrong without a near tie."""
        near = NEAR[self.grade]
        mine, wrong = flips(self.candidate, self.truth, near)
        theirs, _ = flips(self.recipe, self.truth, near)
        rows = min(mine, theirs)
        total = len(self.truth.logits)
        return (rows if rows >= LEAST * total else total), wrong

    def distance(self, side: Scored, rows: int) -> Distance:
        following = torch.tensor(self.text.tokens[1:])[:rows]
        return distance(side.logits[:rows], self.truth.logits[:rows], following)


def texts(subject: Subject) -> list[Text]:
    """The fixed text and random tokens. With drafts, steps have no logits of their own."""
    steps = 1 if subject.plan.draft.depth else STEPS
    room = subject.room(PROMPT + steps)
    found = []
    for name, tokens in (("text", subject.words(room)), ("random tokens", subject.noise(room, 1))):
        prompt = max(1, len(tokens) - steps)
        if len(tokens) > 1:
            found.append(Text(name, tuple(tokens), prompt))
    return found


def check(subject: Subject, weights: Weights) -> Iterator[Row]:
    if why := objection(subject):
        yield skipped(CHECK, "the plan against references", why)
        return
    for run in _runs(subject, weights):
        yield from _rows(subject, weights, run)


def _runs(subject: Subject, weights: Weights) -> list[_Run]:
    listed = texts(subject)
    longest = max(len(text.tokens) for text in listed)
    subject.say("  references in float64 ...")
    with reference_engine(subject, longest + 2, WIDE) as running:
        rounded = Rounded(subject, weights, rounding(subject, weights))
        truths = [score(running, text, rounded) for text in listed]
    subject.say("  the recipe in the plan's type ...")
    grade = "rounded" if rounds_any(subject, weights) else str(subject.plan.model.dtype)
    recipe = swaps(subject, weights, recipe_of)
    runs = []
    for text, truth in zip(listed, truths, strict=True):
        theirs = score(subject.main, text, recipe)
        runs.append(_Run(text, truth, theirs, score(subject.main, text), grade))
    return runs


def _rows(subject: Subject, weights: Weights, run: _Run) -> Iterator[Row]:
    rows, wrong = run.rows()
    found, bar = run.distance(run.candidate, rows), run.distance(run.recipe, rows)
    most = tolerances(bar, run.grade)
    subject.tie = max(subject.tie, min(2 * most.worst, MOST_TIE))
    failed = found.mean > most.mean or found.worst > most.worst or found.kl > most.kl or wrong > 0
    named, where = _healed(subject, weights, run, most) if failed else ((), ())
    left = len(run.truth.logits) - rows
    detail = f"{left} of {len(run.truth.logits)} rows behind a near tie left out" if left else ""
    sides: dict[str, Any] = {
        "reference": f"references in {WIDE}",
        "candidate": f"plan {subject.plan.fingerprint}",
    }
    for what, error, tolerance in (
        ("mean distance of log-probabilities", found.mean, most.mean),
        ("worst distance", found.worst, most.worst),
        ("mean KL divergence", found.kl, most.kl),
    ):
        verdict = bounded(error, tolerance)
        yield Row(
            check=CHECK, what=f"{run.text.name}: {what}", verdict=verdict, error=error,
            tolerance=tolerance, unit="nats", detail=detail,
            named=named if verdict == FAILED else (), where=where if verdict == FAILED else (),
            **sides,
        )  # fmt: skip
        detail = ""
    differ, near = disagreements(
        run.candidate.logits[:rows], run.truth.logits[:rows], 2 * most.worst
    )
    yield Row(
        check=CHECK, what=f"{run.text.name}: best token", error=float(differ - near),
        verdict=PASSED if differ == near else FAILED, tolerance=0.0, unit="rows",
        detail=f"{near} of {rows} rows differ at a near tie" if near else "", named=named,
        where=where, **sides,
    )  # fmt: skip
    if run.truth.choices:
        yield Row(
            check=CHECK, what=f"{run.text.name}: routed and selected", error=float(wrong),
            verdict=bounded(wrong, 0), tolerance=0.0, unit="rows", named=named, where=where,
            **sides,
        )  # fmt: skip


def _healed(
    subject: Subject, weights: Weights, run: _Run, most: Distance
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(ops that are wrong, places): the op whose reference heals, then its site, then the call."""
    subject.say(f"  {run.text.name} misses its bar; looking for the op that heals it ...")

    def near(sites: Sequence[str], calls: Sequence[int] | None = None) -> float:
        side = score(subject.main, run.text, swaps(subject, weights, reference_of, sites, calls))
        again = _Run(run.text, run.truth, run.recipe, side, run.grade)
        rows, wrong = again.rows()
        found = again.distance(side, rows)
        return float("inf") if wrong else max(found.mean / most.mean, found.worst / most.worst)

    sites: dict[str, list[str]] = {}  # by op
    trace: Trace = subject.main.probe
    for _, site, impl in trace.calls:
        listed = sites.setdefault(impl.partition("/")[0], [])
        if site not in listed:
            listed.append(site)
    sites.pop("sample", None)
    left = {op: near(listed) for op, listed in sites.items()}
    ranked = sorted(sites, key=lambda op: left[op])
    counts = range(1, len(ranked) + 1)
    joined = ([site for op in ranked[:count] for site in sites[op]] for count in counts)
    count = next((n for n, some in zip(counts, joined, strict=True) if near(some) <= 1.0), 0)
    if not count:
        return ("not in an op",), ()
    names = tuple(f"op {op}" for op in ranked[:count])
    if count > 1:
        return names, tuple(ranked[:count])
    alone = [site for site in sites[ranked[0]] if near([site]) <= 1.0]
    if not alone:
        return names, tuple(sites[ranked[0]])
    return names, _calls(subject, alone[0], near)


def _calls(
    subject: Subject, site: str, near: Callable[[Sequence[str], Sequence[int]], float]
) -> tuple[str, ...]:
    """The calls of a site, each of which heals by itself; else all of them."""
    calls = subject.main.probe.calls_of(site)
    alone = [n for n in range(calls) if near([site], [n]) <= 1.0] if 1 < calls <= 64 else []
    return tuple(f"{site}, call {n + 1} of {calls}" for n in alone) or (f"{site}, every call",)
