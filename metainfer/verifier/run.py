"""All checks of one model, in an order in which each builds on what the others proved."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from metainfer import __version__
from metainfer.core.errors import MetaInferError, RefusedError
from metainfer.core.intent import Intent
from metainfer.core.verdict import Reason
from metainfer.engine import verdicts
from metainfer.engine.machine import Machine, open_machine
from metainfer.planner.opening import open_model
from metainfer.platform.software import versions
from metainfer.verifier.checks import (
    answers,
    end_to_end,
    invariance,
    memory,
    ops,
    ranks,
    repeat,
    speculation,
    text,
)
from metainfer.verifier.rows import FAILED, PASSED, Row, verdict_of
from metainfer.verifier.subject import Say, Subject, open_subject
from metainfer.verifier.weights import Weights

BREAKS = (
    MetaInferError, ArithmeticError, AssertionError, AttributeError, LookupError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip

Check = Callable[[Subject, Weights], Iterator[Row]]


def _plain(check: Callable[[Subject], Iterator[Row]]) -> Check:
    return lambda subject, weights: check(subject)


CHECKS: tuple[tuple[str, Check], ...] = (
    ("tokenizer and template", _plain(text.check)),
    ("ops", _plain(ops.cases)),
    ("ops in place", ops.calls),
    ("end to end", end_to_end.check),
    ("answers", _plain(answers.check)),
    ("invariance", invariance.check),
    ("determinism", _plain(repeat.determinism)),
    ("graphs", _plain(repeat.graphs)),
    ("speculation", _plain(speculation.check)),
    ("ranks", _plain(ranks.check)),
    ("memory", _plain(memory.check)),
)


def verify(
    intent: Intent,
    say: Say,
    *,
    seed: int | None = None,
    machine: Machine | None = None,
    only: Collection[str] = (),
) -> dict[str, Any]:
    """``{"verdict", "checks", ...}``; the verdict is kept with this machine's records.

    `say` gets progress lines. `seed` (default: drawn) decides every random input. `only`: names of
    `CHECKS`; a verdict on some of them is not kept.

    Raises:
        UserError: the engine cannot be started, or emulates its peers.
    """
    if intent.rank_of is not None:
        raise RefusedError(
            f"one rank of {intent.rank_of}, its peers a stand-in, computes nothing to verify.",
            "Leave --rank-of out; --parallel runs all ranks of a layout.",
            reasons=(Reason("emulated", "the peers of an emulated rank are a stand-in"),),
            code="emulated",
        )
    seed = secrets.randbelow(2**31) if seed is None else seed
    machine = machine or open_machine(intent.platform)
    model = open_model(intent.model)
    begin = time.monotonic()
    say(f"verify {intent.model} (seed {seed})")
    subject = open_subject(intent, machine, model, say, seed)
    rows: list[Row] = []
    try:
        weights = Weights(model, subject.main.resolved.arch, machine.torch_device())
        for name, check in CHECKS:
            if only and name not in only:
                continue
            rows += _guarded(name, check, subject, weights)
    finally:
        subject.main.engine.close()
    plan, verdict = subject.plan, verdict_of(rows)
    failures = [f"{row.check}: {row.what}" for row in rows if row.verdict == FAILED]
    if not only:
        verdicts.keep(machine.store, plan, verdict == PASSED, failures, seed)
    return {
        "verdict": verdict,
        "model": intent.model,
        "machine": machine.fingerprint,
        "device": plan.device,
        "plan": plan.fingerprint,
        "version": __version__,
        "software": versions(),
        "seed": seed,
        "seconds": round(time.monotonic() - begin, 1),
        "checks": [row.to_json() for row in rows],
        "named": named(rows),
    }


def _guarded(name: str, check: Check, subject: Subject, weights: Weights) -> list[Row]:
    """A check that breaks is a failed row; the others still run."""
    subject.say(f"{name}:")
    rows: list[Row] = []
    try:
        rows += check(subject, weights)
    except BREAKS as error:
        text = " ".join(str(error).split())[:300]
        rows.append(
            Row(check=name, what="the check itself", verdict=FAILED, named=("check broke",),
                detail=f"{type(error).__name__}: {text}")
        )  # fmt: skip
    return rows


def named(rows: list[Row]) -> list[dict[str, object]]:
    """Each fault once: its name and where it shows."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for name in row.named if row.verdict == FAILED else ():
            found.setdefault(name, {}).update(dict.fromkeys(row.where or (row.what,)))
    return [{"fault": name, "where": list(places)} for name, places in found.items()]
