"""A plan for a machine that is not here: a file's facts, shipped evidence, nothing tried. No torch.

Three things differ from `machine`. Evidence is never "ran on this card". A kernel that was only
compiled for such a card may be chosen, and the plan says so: it serves there once its op's cases
pass on the owner's card. Software that the file leaves out is what this release requires, on the
record; everything else that is unknown stays unknown.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Decision, Origin
from metainfer.kernels.choice import Choice, Policy, Selection
from metainfer.kernels.evidence import evidence_for
from metainfer.kernels.impl import Evidence
from metainfer.kernels.registry import Registry
from metainfer.ops.catalog import builtin_registry
from metainfer.planner.opening import OpenedModel
from metainfer.planner.resolve import Resolved, choose, resolve
from metainfer.platform.discovery import AUTO
from metainfer.platform.facts import CUDA, Facts
from metainfer.platform.machine_catalog import find_machine
from metainfer.platform.machine_file import MachineFile
from metainfer.platform.origins import DERIVED, PROBED, origin

#: Lowest versions that an installation of this release has.
REQUIRED: Mapping[str, str] = {"python": "3.11", "torch": "2.11", "triton": "3.6"}
COMPILER = "C compiler"
NOT_TRIED = (
    "nothing was tried on that machine: a kernel serves there once its cases pass on the owner's "
    "card"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A described machine. `facts`: the file's and the `assumed` software."""

    machine: MachineFile
    facts: Facts
    assumed: Mapping[str, str]
    registry: Registry = field(default_factory=builtin_registry)

    def policy(self, intent: Intent) -> Policy:
        return Policy(
            pins=intent.ops,
            layout_pins=intent.layouts,
            evidence=evidence_for(self.facts),
            allow_fallback=frozenset(intent.allow_fallback),
            min_evidence=Evidence.COMPILED,
        )

    def resolve(self, model: OpenedModel, intent: Intent) -> Resolved:
        """The plan there.

        Raises:
            UsageError, RefusedError: as `planner.resolve.resolve`.
        """
        if intent.rank_of is not None:
            raise UsageError(
                f"--rank-of {intent.rank_of} runs one rank on this machine, and "
                f"{self.machine.name} is not here.",
                "Leave it out: every layout of that machine is planned for all its ranks.",
            )
        resolved = resolve(
            intent,
            model.facts,
            self.facts,
            self.registry,
            self.policy(intent),
            self.machine.name,
            Origin.FILE,
        )
        choices = resolved.selection.bundle.choices
        decisions = (*resolved.plan.decisions, *self._decisions(choices))
        return dataclasses.replace(
            resolved, plan=dataclasses.replace(resolved.plan, decisions=decisions)
        )

    def choose(self, model: OpenedModel, intent: Intent) -> Selection:
        """The kernels there, whether or not the model's memory fits.

        Raises:
            UsageError, RefusedError: as `planner.resolve.choose`.
        """
        return choose(intent, model.facts, self.facts, self.registry, self.policy(intent))

    def _decisions(self, choices: Iterable[Choice]) -> list[Decision]:
        """What the reader must know of a plan that nothing was tried for."""
        found = [
            Decision("evidence", evidence_counts(choices), Origin.DERIVED, NOT_TRIED),
        ]
        if self.assumed:
            why = "the machine file does not say; this release requires it"
            found.append(Decision("software", dict(self.assumed), Origin.DEFAULT, why))
        return found


def describe(reference: str, intent: Intent | None = None) -> Elsewhere:
    """The machine of a name or file.

    Raises:
        UsageError: it is not known, its file is malformed, or `intent` asks for another platform.
    """
    machine = find_machine(reference)
    platform = machine.facts.platform
    flagged = intent is not None and intent.origin("platform") is Origin.FLAG
    if intent is not None and flagged and intent.platform not in (AUTO, platform):
        raise UsageError(
            f"--platform {intent.platform} contradicts machine {machine.name}, "
            f"whose platform is {platform}.",
            "Leave one of the two out.",
            code="platform_of_machine",
        )
    assumed = missing_software(machine.facts)
    facts = with_software(machine.facts, assumed)
    return Elsewhere(machine=machine, facts=facts, assumed=assumed)


def missing_software(facts: Facts) -> dict[str, str]:
    """Required software of which the facts say neither that it is there nor that it is not."""
    wanted = [name for name in REQUIRED if name != "triton" or facts.device.kind == CUDA]
    found = {name: REQUIRED[name] for name in wanted if name not in facts.software}
    looked = facts.origins.get("host.compiler", "").startswith(f"{PROBED}:")
    if facts.host.compiler is None and not looked:
        found[COMPILER] = "any"
    return found


def with_software(facts: Facts, assumed: Mapping[str, str]) -> Facts:
    """The facts with `assumed` filled in, as derived. Pure."""
    said = origin(DERIVED, "what this release requires")
    origins, software, host = dict(facts.origins), dict(facts.software), facts.host
    for name, version in assumed.items():
        if name == COMPILER:
            host = dataclasses.replace(host, compiler=COMPILER)
            origins["host.compiler"] = said
        else:
            software[name] = version
            origins[f"software.{name}"] = said
    return dataclasses.replace(facts, host=host, software=software, origins=origins)


def evidence_counts(choices: Iterable[Choice]) -> dict[str, int]:
    """How many (site, phase) pairs stand on which evidence, strongest first."""
    counts = Counter(choice.evidence for choice in choices)
    return {level.value: counts[level] for level in Evidence if counts[level]}
