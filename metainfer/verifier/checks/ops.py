"""Every chosen implementation against its op's references: fresh cases, then the model's own calls.

Cases bring odd sizes, ties, borders, poison; the model brings its real shapes, its activations and
its weights as they were loaded. An error may be 1.25 times that of the recipe (or the floor of its
type); it is given as a share of what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch

from metainfer.core.step import Phase
from metainfer.kernels.impl import Impl
from metainfer.kernels.table import Function
from metainfer.ops.case import DTYPES
from metainfer.ops.catalog import op_cases
from metainfer.ops.mistakes import name
from metainfer.ops.qualify import Outcome, applies, run_case
from metainfer.verifier.checks.end_to_end import texts
from metainfer.verifier.judge import Found, Judge
from metainfer.verifier.reference import objection
from metainfer.verifier.rows import FAILED, PASSED, Row, skipped
from metainfer.verifier.scoring import head_site, score
from metainfer.verifier.subject import Subject
from metainfer.verifier.weights import Weights

CASES, CALLS = "ops", "ops in place"


def cases(subject: Subject) -> Iterator[Row]:
    """One row per implementation of the plan."""
    chosen: dict[str, Impl] = {}
    uses: dict[str, dict[str, None]] = {}
    for choice in subject.main.resolved.selection.bundle.choices:
        chosen[choice.impl.id] = choice.impl
        uses.setdefault(choice.impl.id, {})[choice.request.site] = None
    for key, impl in chosen.items():
        subject.say(f"  cases of {key} ...")
        yield case_row(subject, impl, list(uses[key]))


def case_row(subject: Subject, impl: Impl, sites: list[str]) -> Row:
    machine, dtype = subject.machine, subject.plan.model.dtype
    device = machine.torch_device()
    phases = frozenset(Phase)
    outcomes = [
        run_case(impl, case, dtype, device, machine.registry)
        for case in op_cases(impl.op).CASES[impl.op](subject.seed)
        if applies(impl, case, dtype, machine.facts, phases)
    ]
    failed = [outcome for outcome in outcomes if not outcome.verdict.accepted]
    texts = [reason.message for outcome in failed for reason in outcome.verdict.reasons]
    return Row(
        check=CASES,
        what=impl.id,
        verdict=PASSED if outcomes and not failed else FAILED,
        reference=f"{impl.op}'s reference in float64, {len(outcomes)} cases",
        candidate=impl.id,
        error=_share(outcomes),
        tolerance=1.0,
        unit="of the limit",
        named=name(failed, dtype) if failed else (),
        where=tuple(sites) if failed else (),
        detail="; ".join(texts[:2]) if failed else "" if outcomes else "no case applies",
    )


def _share(outcomes: list[Outcome]) -> float:
    """The largest error as a share of its limit; infinite for what is no number."""
    shares = [0.0]
    for outcome in outcomes:
        if outcome.error is not None and outcome.allowed is not None:
            pairs = zip(outcome.error, outcome.allowed, strict=True)
            shares += [error / limit for error, limit in pairs]
        elif not outcome.verdict.accepted:
            shares.append(math.inf)
    return max(shares)


def calls(subject: Subject, weights: Weights) -> Iterator[Row]:
    """One row per site: the calls of two texts, and every layer's weights."""
    if subject.plan.layouts[0].ranks > 1:
        yield skipped(CALLS, "calls of the running model", objection(subject))
        return
    subject.say("  the model's own calls ...")
    judge = Judge(
        weights,
        subject.plan.model.dtype,
        subject.machine.torch_device(),
        head_site(subject.main),
        {"output head tied to the embedding": (_tied(weights, subject.plan.model.dtype),)},
    )
    for text in texts(subject):
        score(subject.main, text, judge)
    sites: dict[str, list[tuple[Phase, Found]]] = {}
    for (site, phase), found in judge.found.items():
        sites.setdefault(site, []).append((phase, found))
    for site, several in sites.items():
        yield _call_row(site, several)
    for site, why in judge.skipped.items():
        yield skipped(CALLS, site, why)


def _call_row(site: str, several: list[tuple[Phase, Found]]) -> Row:
    failed = [place for _, found in several for place in found.failed]
    worst = max((found.worst for _, found in several), key=lambda pair: pair[0] / pair[1])
    named = [found.named for _, found in several if found.failed]
    impls = dict.fromkeys(found.impl for _, found in several)
    count = sum(found.calls for _, found in several)
    phases = ", ".join(phase.value for phase, _ in several)
    return Row(
        check=CALLS,
        what=f"{', '.join(impls)} at {site}",
        verdict=FAILED if failed else PASSED,
        reference=f"reference in float64, {count} calls ({phases})",
        candidate=", ".join(impls),
        error=worst[0] / worst[1],
        tolerance=1.0,
        unit="of the limit",
        named=next((names for names in named if names), ()),
        where=tuple(failed[:8]),
    )


def _tied(weights: Weights, dtype: str) -> Callable[..., object]:
    """The output head as it would be if it were the embedding."""

    def wrong(x: object, weight: object) -> object:
        table = weights.dense(("embed", 0), DTYPES[dtype], weights.device)
        reference: Function = op_cases("linear_f32").REFERENCES["linear_f32"]
        held = {"weight": table.data["weight"].to("cpu", torch.float64)}
        return reference(x, dataclasses.replace(table, data=held))

    return wrong
