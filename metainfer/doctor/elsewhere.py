"""The doctor for a machine that is described and not here, and the file that describes this one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer.core.errors import RefusedError
from metainfer.doctor.finding import Finding, Severity, information
from metainfer.doctor.inputs import Inputs
from metainfer.doctor.model_view import ModelView, view_of

if TYPE_CHECKING:
    from metainfer.core.intent import Intent
    from metainfer.doctor.stock.audit import StockRequest
    from metainfer.engine.elsewhere import Elsewhere
    from metainfer.kernels.choice import Selection
    from metainfer.platform.machine_file import MachineFile

ELSEWHERE = "Read it there: metainfer doctor --save-machine FILE.toml."
#: Refusals that are about room: the choice of kernels stands all the same.
_ROOM = ("does_not_fit", "unknown_memory")


def doctor(
    intent: Intent | None, reference: str, stock: StockRequest | None = None
) -> dict[str, object]:
    """The report on a described machine; what only its owner can read is said to be unknown.

    Raises:
        UsageError: the machine is not known, or its file is malformed.
        UserError: the model cannot be opened.
    """
    from metainfer.doctor import report
    from metainfer.engine.elsewhere import describe
    from metainfer.platform.machine_file import unknown_values

    there = describe(reference, intent)
    more = _notes(there)
    ops: Selection | RefusedError | None = None
    model: ModelView | None = None
    if intent is not None:
        ops, model, found = _kernels(there, intent)
        more += found
    made = report.document(Inputs(facts=there.facts, model=model), ops, more, stock)
    machine: dict[str, Any] = dict(made["machine"])  # type: ignore[call-overload]
    machine["name"] = there.machine.name
    machine["file"] = there.machine.source
    machine["unknown"] = list(unknown_values(there.machine.facts))
    return {**made, "machine": machine}


def joined(found: Iterable[Finding]) -> list[Finding]:
    """Findings about a machine that is not here: one for all devices alike, and what is unknown
    is for its owner to read."""
    groups: dict[tuple[str, Severity, str, str], list[Finding]] = {}
    for item in found:
        remedy = ELSEWHERE if item.id.endswith(".unknown") else item.remedy
        groups.setdefault((item.id, item.severity, item.what, remedy), []).append(item)
    return [
        dataclasses.replace(items[0], where=_places([item.where for item in items]), remedy=key[3])
        for key, items in groups.items()
    ]


def _places(places: Sequence[str]) -> str:
    return places[0] + (f" and {len(places) - 1} more like it" if len(places) > 1 else "")


def save(reference: str | None, file: str, platform: str | None) -> None:
    """Write this machine, or the described one as a start for an own file.

    Raises:
        UserError: the platform cannot be opened, or the file not be written.
    """
    from metainfer.platform.machine_catalog import find_machine, save_machine

    path = Path(file)
    machine = find_machine(reference) if reference is not None else this_machine(path, platform)
    save_machine(machine, path)


def this_machine(path: Path, platform: str | None = None) -> MachineFile:
    """This machine as a file would describe it; a speed that was only guessed is left out.

    Raises:
        UserError: the platform cannot be opened.
    """
    from metainfer.engine.machine import open_machine
    from metainfer.platform.machine_catalog import machine_name
    from metainfer.platform.machine_file import MachineFile, complete_origins
    from metainfer.platform.origins import SEED

    here = open_machine(platform)
    facts = here.facts
    if any(said.startswith(f"{SEED}:") for said in facts.origins.values()):
        facts = here.platform.facts()
    return MachineFile(name=machine_name(path), facts=complete_origins(facts))


def _kernels(
    there: Elsewhere, intent: Intent
) -> tuple[Selection | RefusedError, ModelView | None, list[Finding]]:
    """The chosen kernels, and what stands in the way of the plan beside them."""
    from metainfer.doctor.report import refusals
    from metainfer.engine.elsewhere import NOT_TRIED, evidence_counts
    from metainfer.planner.opening import open_model

    model = open_model(intent.model, adapters=intent.adapters)
    found: list[Finding] = []
    try:
        resolved = there.resolve(model, intent)
        selection, view = resolved.selection, view_of(resolved)
        if (refusal := resolved.refusal()) is not None:
            found += refusals(refusal)
    except RefusedError as error:
        if error.code not in _ROOM:
            return error, None, []
        found += refusals(error)
        selection = there.choose(model, intent)
        view = ModelView(selection=selection)
    counts = evidence_counts(selection.bundle.choices)
    listed = ", ".join(f"{number} '{level}'" for level, number in counts.items())
    what = f"evidence of the chosen kernels: {listed}; {NOT_TRIED}."
    remedy = "Start there once: every chosen kernel goes through its cases first."
    proof = "kernels/evidence.json and kernels/compile_manifest.json"
    found.append(information("machine.evidence", "operations", what, remedy, proof))
    return selection, view, found


def _notes(there: Elsewhere) -> list[Finding]:
    from metainfer.platform.machine_file import unknown_values

    machine = there.machine
    unknown = unknown_values(machine.facts)
    place = f"machine {machine.name}"
    what = (
        f"described by {machine.source}, not read off a machine; "
        f"{len(unknown)} values are unknown: {', '.join(unknown)}."
    )
    proof = f"file: {machine.source}"
    found = [information("machine.described", place, what, ELSEWHERE, proof)]
    if there.assumed:
        listed = ", ".join(f"{name} {version}" for name, version in there.assumed.items())
        what = f"the file does not say; taken from what this release requires: {listed}."
        found.append(information("machine.software", place, what, ELSEWHERE, proof))
    devices = len(machine.facts.devices)
    if devices > 1:
        what = (
            f"of {devices} devices one serves while it holds the model; over several runs what "
            "--parallel names, or the best layout where none does."
        )
        proof = f"devices = {devices}"
        found.append(information("machine.devices", place, what, evidence=proof))
    return found
