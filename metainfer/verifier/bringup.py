"""``verify --bringup``: a card nobody has seen. Every kernel that could run on it is tried.

A kernel of which it is only known that it compiles, or nothing at all, goes through its op's cases
in a child process, under a time limit: one that crashes or hangs is a row, and the next child goes
on behind it. What passes is unlocked, as at a first start; what fails is not chosen again. The
report is one file that its owner can send back: the card, the software, the outcomes. It names no
host, user, path or serial number.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from metainfer import __version__
from metainfer.core.digest import to_plain
from metainfer.core.env import cache_dir
from metainfer.core.errors import UserError
from metainfer.core.intent import Intent
from metainfer.core.step import Phase
from metainfer.engine.machine import Machine, open_machine
from metainfer.engine.proving import CHILD
from metainfer.kernels.evidence import evidence_for
from metainfer.kernels.impl import Context, Evidence, Impl, OpRequest
from metainfer.kernels.select_op import objections
from metainfer.ops.case import Case
from metainfer.ops.catalog import op_cases
from metainfer.platform.facts import CPU
from metainfer.platform.software import versions
from metainfer.verifier.subject import Say

WHOLE = ("device", "capability", "software")
"""Reasons that hold for every shape."""

#: What is told of a card. Not its serial number, its place or what is free on it.
CARD = (
    "kind", "name", "vendor", "capability", "units", "memory_bytes", "shared_bytes_per_block",
    "warp", "dot_types", "storage_types", "features",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """`outcome`: passed, failed, crashed, hung, refused, known. `evidence`: before."""

    impl: str
    outcome: str
    evidence: str
    reasons: tuple[str, ...] = ()
    seconds: float | None = None


def bring_up(
    intent: Intent, target: Path, say: Say, *, time_limit_s: float, child: str = CHILD
) -> dict[str, Any]:
    """Try everything, write the report to `target` (JSON) and beside it (text); returns it.

    Raises:
        UserError: the platform cannot run, or the file cannot be written.
    """
    machine = open_machine(intent.platform)
    device = machine.facts.device
    dtype = intent.dtype or ("float32" if device.kind == CPU else "bfloat16")
    machine.recall(dtype)
    before = evidence_for(machine.facts, tuple(machine.qualified.values()))
    untried: list[Impl] = []
    rows: list[Outcome] = []
    for impl in machine.registry.impls():
        known = before.get(impl.id, Evidence.NONE)
        refused = objections_of(impl, dtype, machine)
        if impl.provider == "reference":
            continue
        if refused:
            rows.append(Outcome(impl.id, "refused", known.value, refused))
        elif known is Evidence.THIS_CARD:
            rows.append(Outcome(impl.id, "known", known.value))
        else:
            untried.append(impl)
    say(f"{len(untried)} kernels to try in {dtype} on {device.name}")
    levels = {impl.id: before.get(impl.id, Evidence.NONE).value for impl in untried}
    for tried in machine.prove_apart(untried, dtype, time_limit_s=time_limit_s, child=child):
        say(f"  {tried.impl:<28} {tried.outcome}")
        reasons = tuple(map(_clean, tried.reasons))
        level = levels[tried.impl]
        rows.append(Outcome(tried.impl, tried.outcome, level, reasons, tried.seconds))
    document = _document(machine, dtype, sorted(rows, key=lambda row: row.impl), time_limit_s)
    _write(target, json.dumps(document, indent=1) + "\n")
    _write(target.with_suffix(".txt"), str(document["text"]) + "\n")
    return document


def objections_of(impl: Impl, dtype: str, machine: Machine) -> tuple[str, ...]:
    """Why no case of its op can run here; empty when one can."""
    if foreign := _foreign(impl, dtype, machine):
        return foreign
    said: dict[str, None] = {}
    for case in _cases(impl.op):
        for phase in Phase:
            if phase in case.phases and phase in impl.phases:
                request = OpRequest(
                    case.op, case.op, phase, dtype, case.shape, case.semantics, case.schemes
                )
                verdict = objections(impl, Context(request, machine.facts, impl.requires_layout))
                if verdict.accepted:
                    return ()
                said.update(dict.fromkeys(reason.message for reason in verdict.reasons))
    return tuple(said)[:6] or (f"no case of {impl.op}",)


def _foreign(impl: Impl, dtype: str, machine: Machine) -> tuple[str, ...]:
    """What stands against it whatever the shape; without it no case need be drawn."""
    context = Context(OpRequest(impl.op, impl.op, Phase.DECODE, dtype, {}), machine.facts)
    said = []
    for condition in impl.conditions:
        with contextlib.suppress(KeyError):  # one that looks at the shape
            said += [r.message for r in condition(context).reasons if r.code in WHOLE]
    return tuple(said)


@cache
def _cases(op: str) -> tuple[Case, ...]:
    return tuple(op_cases(op).CASES[op](0))


def _document(
    machine: Machine, dtype: str, rows: Sequence[Outcome], time_limit_s: float
) -> dict[str, Any]:
    card = machine.facts.device
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
    unlocked = [row.impl for row in rows if row.outcome == "passed"]
    failed = [row for row in rows if row.outcome in ("failed", "crashed", "hung")]
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    lines = [f"bring-up of {card.name} ({dtype}), metainfer {__version__}: {told or 'nothing'}"]
    lines += [f"  unlocked: {key}" for key in unlocked]
    lines += [f"  {row.outcome}: {row.impl}: {'; '.join(row.reasons[:2])}" for row in failed]
    return {
        "report": "metainfer bring-up",
        "version": __version__,
        "platform": machine.platform.name,
        "card": {name: to_plain(getattr(card, name)) for name in CARD},
        "software": versions(),
        "dtype": dtype,
        "time_limit_s": time_limit_s,
        "kernels": [to_plain(row) for row in rows],
        "unlocked": unlocked,
        "failed": [row.impl for row in failed],
        "text": "\n".join(lines),
    }


def _clean(text: str) -> str:
    """Without folders of this user."""
    for folder in (str(cache_dir()), str(Path.cwd()), str(Path.home())):
        if len(folder) > 1:
            text = text.replace(folder, "~")
    return text


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(path.open("w", encoding="utf-8")) as file:
            file.write(text)
    except OSError as error:
        raise UserError(
            f"the report cannot be written to {path}: {error.strerror}.",
            "Pass another file with --report.",
            code="not_writable",
        ) from error
