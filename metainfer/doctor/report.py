"""The doctor's one document. Pure but for `doctor`, which reads.

The contract is ``{"machine", "software", "findings", "ops", "summary"}``; keys are only ever added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from metainfer.core.digest import to_plain
from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.doctor import elsewhere, text_report
from metainfer.doctor.checks import (
    acs,
    architecture,
    container,
    cpu_features,
    disk,
    environment,
    foreign_environment,
    gpu,
    handshake,
    host,
    iommu,
    links,
    memory,
    numa,
    pages,
    peers,
    platform,
    power,
    software,
    windows,
)
from metainfer.doctor.finding import Finding, Severity, blocker
from metainfer.doctor.inputs import Inputs, from_text, gather
from metainfer.doctor.model_view import view_of
from metainfer.doctor.stock.audit import StockRequest, audit
from metainfer.doctor.topology import topology
from metainfer.kernels import explain
from metainfer.kernels.choice import Choice, Selection
from metainfer.kernels.impl import Quality
from metainfer.platform.facts import CUDA

if TYPE_CHECKING:
    from metainfer.core.intent import Intent
    from metainfer.planner.resolve import Resolved
    from metainfer.platform.host_text import HostText

#: In the order of the report.
CHECKS = (
    platform.check,
    software.check,
    environment.check,
    foreign_environment.check,
    container.check,
    host.check,
    memory.check,
    cpu_features.check,
    gpu.check,
    power.check,
    links.check,
    windows.check,
    acs.check,
    iommu.check,
    peers.check,
    numa.check,
    disk.check,
    architecture.check,
    pages.check,
    handshake.check,
)

_WORST_FIRST = list(Severity)

text = text_report.text


def doctor(
    intent: Intent | None = None,
    machine: str | None = None,
    *,
    printed: HostText | None = None,
    deep: bool = False,
    stock: StockRequest | None = None,
) -> dict[str, object]:
    """Examine this machine, a described one or a host text, and the kernels a model would get.

    Args:
        printed: what a host printed; it is examined instead of this one, without a model's kernels.
        stock: also audit another engine's command line against the same machine.
        deep: also prove peer access by bytes, in a child process; GPUs are busy meanwhile.

    Raises:
        UsageError: the machine is not known, its file is malformed, or wishes contradict.
        UserError: the platform or the model cannot be opened.
    """
    from metainfer.doctor.peer_test import prove_peers
    from metainfer.platform.discovery import select_platform

    if printed is not None:
        if machine is not None or deep or intent is not None:
            raise UsageError(
                "A host text is examined by itself.",
                "Leave out --machine, --model and --deep, or plan with a machine file.",
            )
        return document(from_text(printed), stock=stock)
    if machine is not None:
        if deep:
            raise UsageError(
                "--deep tests the GPUs of this machine, and --machine describes another.",
                "Run it there.",
            )
        return elsewhere.doctor(intent, machine, stock)
    wanted = None if intent is None or intent.platform == "auto" else intent.platform
    inputs = gather(select_platform(wanted))
    if deep and inputs.facts.device.kind == CUDA and len(inputs.facts.devices) > 1:
        inputs = dataclasses.replace(inputs, proofs=prove_peers(len(inputs.facts.devices)))
    if intent is None:
        return document(inputs, stock=stock)
    found = _resolved(intent)
    if isinstance(found, RefusedError):
        return document(inputs, found, stock=stock)
    inputs = dataclasses.replace(inputs, model=view_of(found))
    refusal = found.refusal()  # what `serve` would say of the same plan
    against = [] if refusal is None else refusals(refusal)
    return document(inputs, found.selection, against, stock)


def _resolved(intent: Intent) -> Resolved | RefusedError:
    from metainfer.engine.machine import open_machine
    from metainfer.planner.opening import open_model

    model, here = open_model(intent.model, adapters=intent.adapters), open_machine(intent.platform)
    try:
        here.recall(here.resolve(model, intent).plan.model.dtype)
        return here.resolve(model, intent)
    except RefusedError as error:
        return error


def run_checks(inputs: Inputs) -> list[Finding]:
    """Every check's findings, worst first, otherwise in the order of `CHECKS`."""
    found = [finding for check in CHECKS for finding in check(inputs)]
    if inputs.local is None:
        found = elsewhere.joined(found)
    return sorted(found, key=lambda finding: _WORST_FIRST.index(finding.severity))


def document(
    inputs: Inputs,
    ops: Selection | RefusedError | None = None,
    more: Iterable[Finding] = (),
    stock: StockRequest | None = None,
) -> dict[str, object]:
    """The report. `ops`: the kernels chosen for a model, why there are none, or no model given."""
    found = [*run_checks(inputs), *more]
    audited: dict[str, Any] = {}
    if stock is not None:
        environ = None if inputs.local is None else inputs.local.environ
        audited = audit(inputs.facts, stock, environ)
        found += audited.pop("findings")
    choices: Sequence[Choice] = ()
    rows: list[dict[str, object]] = []
    if isinstance(ops, RefusedError):
        found += refusals(ops)
    elif ops is not None:
        choices, rows = ops.bundle.choices, explain.rows(ops)
    found.sort(key=lambda finding: _WORST_FIRST.index(finding.severity))
    facts = inputs.facts
    return {
        "machine": {
            "platform": facts.platform,
            "devices": to_plain(facts.devices),
            "host": to_plain(facts.host),
            "links": to_plain(facts.links),
            "origins": to_plain(facts.origins),
        },
        "software": dict(facts.software),
        "findings": [finding.to_json() for finding in found],
        "ops": rows,
        "bundle": dict(ops.bundle.layouts) if isinstance(ops, Selection) else None,
        "topology": topology(inputs),
        **({"audit": audited} if audited else {}),
        "summary": summary(found, choices if isinstance(ops, Selection) else None),
    }


def refusals(error: RefusedError) -> list[Finding]:
    """A refused selection as blockers, one per reason; the refusal itself when it has none."""
    if not error.reasons:
        return [blocker(f"ops.{error.code}", "model", error.cause, error.remedy, error.code)]
    return [
        blocker(
            f"ops.{reason.code}",
            ", ".join(_sites(reason)) or "model",
            reason.message,
            error.remedy,
            f"{reason.code}: {_numbers(reason)}",
        )
        for reason in error.reasons
    ]


def _sites(reason: Reason) -> list[str]:
    """The op sites that a reason of a refused selection concerns."""
    places: Any = reason.data.get("sites", ())
    return list(dict.fromkeys(place.partition("@")[0] for place in places))


def _numbers(reason: Reason) -> str:
    """What was compared, without the list of places."""
    shown = [f"{key} {value}" for key, value in reason.data.items() if key != "sites"]
    return ", ".join(shown) or reason.message


def summary(found: Sequence[Finding], choices: Sequence[Choice] | None) -> str:
    """One line: operations on lesser paths with their price, then the count of findings."""
    counts = {level: sum(f.severity is level for f in found) for level in Severity}
    graded = (
        f"{counts[Severity.BLOCKER]} blockers, {counts[Severity.SLOWS]} things that slow, "
        f"{counts[Severity.INFORMATION]} notes"
    )
    return graded if choices is None else f"{operations_line(choices)}; {graded}"


def operations_line(choices: Sequence[Choice]) -> str:
    """As in "3 of 14 operations are on reference paths; estimated prefill ×0.06".

    The factor is the time of the fastest known implementations over that of the chosen ones,
    weighted by how often a step calls each; it is left out, and that is said, where a number is
    missing.
    """
    total = len(choices)
    parts = []
    for quality in (Quality.REFERENCE, Quality.COMPATIBLE):
        count = sum(choice.quality is quality for choice in choices)
        if count:
            parts.append(f"{count} of {total} operations are on {quality.value} paths")
    if not parts:
        parts.append(f"all {total} operations are on native paths")
    for name, phase in (("prefill", Phase.CHUNK), ("decode", Phase.DECODE)):
        of_phase = [choice for choice in choices if choice.request.phase is phase]
        if not of_phase:
            continue
        factor = speed_factor(of_phase)
        if factor is None:
            parts.append(f"{name} not estimated")
        elif factor < 0.995:
            parts.append(f"estimated {name} ×{factor:.2f}")
    return "; ".join(parts)


def speed_factor(choices: Sequence[Choice]) -> float | None:
    """Speed against the fastest known implementations, 1 = as fast; None without all numbers."""
    own = best = 0.0
    for choice in choices:
        if choice.seconds is None or not choice.slowdown:
            return None
        own += choice.seconds * choice.request.count
        best += choice.seconds / choice.slowdown * choice.request.count
    return best / own if own else None


def blocked(report: dict[str, object]) -> bool:
    """Whether the report holds a blocker."""
    found = report["findings"]
    assert isinstance(found, list)
    return any(finding["severity"] == Severity.BLOCKER.value for finding in found)


def exit_status(report: dict[str, object]) -> int:
    """1 when something blocks, else 0."""
    return int(blocked(report))
