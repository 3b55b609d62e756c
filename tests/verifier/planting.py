"""Verify a tiny model whose machine holds a faulty kernel that its records call proven."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from metainfer.core.intent import Intent
from metainfer.core.records import RecordStore
from metainfer.engine.machine import Machine, open_machine
from metainfer.kernels.evidence import Qualification
from metainfer.kernels.registry import Registry
from metainfer.platform.fingerprint import fingerprint
from metainfer.verifier.run import verify

SEED = 20_261_129


def machine_with(faults: dict[str, str], folder: Path) -> Machine:
    """This machine with the implementations of `faults` (id -> name in `planted.faults`) replaced;
    its records, kept in `folder`, say that everything passed its cases."""
    machine = open_machine("cpu")
    impls = []
    for impl in machine.registry.impls():
        fault = faults.get(impl.id)
        impls.append(dataclasses.replace(impl, load=f"planted.faults:{fault}") if fault else impl)
    assert set(faults) <= {impl.id for impl in impls}
    layouts = {
        layout: machine.registry.layout(layout)
        for impl in impls
        for layout in impl.requires_layout.values()
    }
    return dataclasses.replace(
        machine,
        registry=Registry(impls, layouts.values()),
        qualified={impl.id: Qualification(impl.id, True) for impl in impls},
        store=RecordStore(folder, fingerprint(machine.facts)),
    )


def verified(
    model: str, faults: dict[str, str], folder: Path, *, only: tuple[str, ...] = (), **wish: Any
) -> dict[str, Any]:
    """The document of `verify`."""
    intent = Intent(model=model, **{"threads": 1, "context": 160, "concurrency": 8, **wish})
    machine = machine_with(faults, folder)
    return verify(intent, lambda text: None, seed=SEED, machine=machine, only=only)


def named(document: dict[str, Any]) -> dict[str, list[str]]:
    """Fault -> where it shows."""
    return {fault["fault"]: fault["where"] for fault in document["named"]}
