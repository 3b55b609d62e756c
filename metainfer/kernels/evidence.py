"""What is known to work, and how we know. No torch.

The rule, from strongest to weakest; a step is taken only if nothing stronger holds:

1. `THIS_CARD`: the op's cases passed in this installation on this machine (a qualification record
   of its fingerprint). Nothing shipped ever gives it.
2. `OTHER_CARD`: the shipped ``evidence.json`` lists a run of the implementation on any hardware,
   the same model of card included. Those entries name architecture, kind of run, versions.
3. `COMPILED`: the shipped compile manifest holds a passing build for this capability.
4. `NONE`. A *failed* qualification gives it too, whatever was shipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from metainfer.kernels.impl import Evidence
from metainfer.platform.facts import Facts


@dataclass(frozen=True, slots=True)
class Run:
    """One shipped proof: `arch` (``x86_64``, ``sm_90``), `how` (``cases``), versions used."""

    arch: str
    how: str
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Qualification:
    """One implementation's cases on this machine: `passed`, or the reasons against it."""

    impl: str
    passed: bool
    reasons: tuple[str, ...] = ()


@cache
def shipped() -> Mapping[str, tuple[Run, ...]]:
    """Implementation id -> runs, from ``evidence.json``."""
    body = json.loads(resources.files("metainfer.kernels").joinpath("evidence.json").read_text())
    return {
        impl: tuple(Run(run["arch"], run["how"], run.get("versions", {})) for run in runs)
        for impl, runs in body["impls"].items()
    }


@cache
def compiled() -> Mapping[str, frozenset[str]]:
    """Implementation id -> targets (``sm_90``) that every kernel of it was built for."""
    path = resources.files("metainfer.kernels").joinpath("compile_manifest.json")
    if not path.is_file():
        return {}
    targets: dict[str, dict[str, bool]] = {}
    for entry in json.loads(path.read_text())["entries"]:
        seen = targets.setdefault(entry["impl"], {})
        seen[entry["target"]] = seen.get(entry["target"], True) and bool(entry["ok"])
    return {impl: frozenset(t for t, ok in seen.items() if ok) for impl, seen in targets.items()}


def evidence_for(
    facts: Facts, records: Sequence[Qualification] = (), ids: Sequence[str] = ()
) -> dict[str, Evidence]:
    """Evidence by implementation id, for `Policy.evidence`; absent means `NONE`.

    `records`: this machine's qualifications, the last of an id counts. `ids` limits the answer.
    """
    found: dict[str, Evidence] = {}
    capability = facts.device.capability
    if capability is not None:
        target = f"sm_{capability[0]}{capability[1]}"
        found |= {impl: Evidence.COMPILED for impl, t in compiled().items() if target in t}
    found |= dict.fromkeys(shipped(), Evidence.OTHER_CARD)
    for record in records:
        found[record.impl] = Evidence.THIS_CARD if record.passed else Evidence.NONE
    return {impl: how for impl, how in found.items() if not ids or impl in ids}
