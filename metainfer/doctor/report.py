"""The doctor's one document, and the same for people. Pure but for `doctor`, which reads.

The contract is ``{"machine", "software", "findings", "ops", "summary"}``; keys are only ever added.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from metainfer.core.digest import to_plain
from metainfer.core.errors import RefusedError
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.doctor import elsewhere
from metainfer.doctor.checks import (
    cpu_features,
    disk,
    environment,
    gpu,
    host,
    links,
    platform,
    software,
)
from metainfer.doctor.finding import Finding, Severity, blocker
from metainfer.doctor.inputs import Inputs, gather
from metainfer.kernels import explain
from metainfer.kernels.impl import Quality
from metainfer.kernels.select import Choice, Selection
from metainfer.platform.facts import CPU

if TYPE_CHECKING:
    from metainfer.core.intent import Intent

#: In the order of the report.
CHECKS = (
    platform.check,
    software.check,
    environment.check,
    host.check,
    cpu_features.check,
    gpu.check,
    links.check,
    disk.check,
)

_WORST_FIRST = list(Severity)


def doctor(intent: Intent | None = None, machine: str | None = None) -> dict[str, object]:
    """Examine this machine or a described one, and with an intent the kernels its model would get.

    Raises:
        UsageError: the machine is not known, or its file is malformed.
        UserError: the platform or the model cannot be opened.
    """
    from metainfer.platform.discovery import select_platform

    if machine is not None:
        return elsewhere.doctor(intent, machine)
    wanted = None if intent is None or intent.platform == "auto" else intent.platform
    inputs = gather(select_platform(wanted))
    return document(inputs, None if intent is None else _selection(intent))


def _selection(intent: Intent) -> Selection | RefusedError:
    from metainfer.engine.machine import open_machine
    from metainfer.planner.opening import open_model

    model, here = open_model(intent.model), open_machine(intent.platform)
    try:
        here.recall(here.resolve(model, intent).plan.model.dtype)
        return here.resolve(model, intent).selection
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
) -> dict[str, object]:
    """The report. `ops`: the kernels chosen for a model, why there are none, or no model given."""
    found = [*run_checks(inputs), *more]
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
        "summary": summary(found, choices if isinstance(ops, Selection) else None),
    }


def refusals(error: RefusedError) -> list[Finding]:
    """A refused selection as blockers, one per reason; the refusal itself when it has none."""
    if not error.reasons:
        return [blocker(f"ops.{error.code}", "model", error.cause, error.remedy)]
    return [
        blocker(
            f"ops.{reason.code}",
            ", ".join(_sites(reason)) or "model",
            reason.message,
            error.remedy,
        )
        for reason in error.reasons
    ]


def _sites(reason: Reason) -> list[str]:
    """The op sites that a reason of a refused selection concerns."""
    places: Any = reason.data.get("sites", ())
    return list(dict.fromkeys(place.partition("@")[0] for place in places))


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


def text(report: dict[str, Any], width: int = 100) -> str:
    """The report for people, without colour codes."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False)
    for part in _parts(report):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _parts(report: dict[str, Any]) -> Iterable[Any]:
    """What `text` prints, as rich renderables: machine, findings, operations, summary."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    machine = report["machine"]
    shown = Table.grid(padding=(0, 2))
    lines = [_device_line(device) for device in machine["devices"]]
    for line in dict.fromkeys(lines):
        places = [str(index) for index, other in enumerate(lines) if other == line]
        shown.add_row(f"device {', '.join(places)}", line)
    shown.add_row("host", _host_line(machine["host"]))
    present = [f"{name} {number}" for name, number in report["software"].items() if number]
    shown.add_row("software", Text(", ".join(present)))
    yield shown
    for level in Severity:
        for finding in report["findings"]:
            if finding["severity"] == level.value:
                yield Text(f"{level.value}: {finding['where']}: {finding['what']}")
                if finding["remedy"]:
                    yield Padding(Text(f"-> {finding['remedy']}"), (0, 0, 0, 4))
    if report["ops"]:
        yield from _operations(report["ops"])
    yield Text(report["summary"])


def _operations(rows: Sequence[dict[str, Any]]) -> Iterable[Any]:
    """Equal rows of several phases are joined; refused implementations stand below each."""
    from rich.padding import Padding
    from rich.text import Text

    merged: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        chosen, slowdown = row["chosen"], row["slowdown"]
        refused = [
            f"{loser['impl']}: {'; '.join(reason['message'] for reason in loser['reasons'])}"
            for loser in row["rejected"]
        ]
        price = "-" if slowdown is None else f"×{slowdown:.2f}"
        key = (row["op"], chosen["impl"], chosen["quality"], chosen["evidence"], price, *refused)
        merged.setdefault(key, []).append(row["phase"])
    lines: list[tuple[str, ...]] = [("op", "phase", "chosen", "quality", "evidence", "slowdown")]
    lines += [(key[0], ", ".join(phases), *key[1:5]) for key, phases in merged.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    shown = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    yield Text(shown[0])
    for line, key in zip(shown[1:], merged, strict=True):
        yield Text(line.rstrip())
        for refused_line in key[5:]:
            yield Padding(Text(f"not {refused_line}"), (0, 0, 0, 4))


def _device_line(device: dict[str, Any]) -> str:
    parts = [device["name"]]
    if device["capability"]:
        parts.append(f"capability {'.'.join(map(str, device['capability']))}")
    unit = "cores" if device["kind"] == CPU else "multiprocessors"
    parts.append(f"{device['units'] or 'unknown number of'} {unit}")
    memory = device["memory_bytes"]
    parts.append("memory unknown" if memory is None else f"{memory / 2**30:.1f} GiB")
    return ", ".join(parts)


def _host_line(found: dict[str, Any]) -> str:
    memory = found["memory_bytes"]
    return ", ".join(
        (
            str(found["processor"] or "processor unknown"),
            f"{found['usable_cores'] or 'unknown'} usable cores",
            "memory unknown" if memory is None else f"{memory / 2**30:.1f} GiB",
            f"compiler {found['compiler'] or 'none'}",
            f"IOMMU {found['iommu'] or 'unknown'}",
        )
    )
