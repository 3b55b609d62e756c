"""Where computing beside something else was measured to gain: the shipped ``gains.json``.

A row belongs to a family of models and a capability: cards of one capability run the same kernels,
and the plan names the card that was measured. It is of one rank alone, or of one layout over cards
without peer access, by collectives of ours. Elsewhere all stay off until somebody asks for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from metainfer.comm.plan import AUTO
from metainfer.comm.topology import from_facts
from metainfer.core.intent import Intent
from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Reason
from metainfer.models.arch import Arch
from metainfer.planner.layouts import talks
from metainfer.platform.facts import CPU, Facts

SHARED, HALVES, PIECES = "shared_beside", "halves", "sum_pieces"
GATHERS = "gathers_beside"
ALONE = "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """`gains`: tokens of a step -> seconds without / with, the median of pairs in the worse order
    of launch; `tokens`: the largest step whose interval, and that of all smaller ones, lies above
    1, of chunks the smallest whose and that of all larger ones do; `device`: what it was
    measured on; `record`: its name in ``benchmarks/records``."""

    family: str
    capability: tuple[int, int]
    ranks: str
    device: str
    gains: Mapping[int, float]
    tokens: int
    record: str

    @property
    def why(self) -> str:
        found = ", ".join(f"{gain:.3f} at {tokens:,}" for tokens, gain in self.gains.items())
        return f"gain on {self.device}: {found} tokens (record {self.record})"


@cache
def shipped(what: str) -> tuple[Gain, ...]:
    """Rows of one of the four; `Gain.ranks` is ``alone`` or a layout."""
    body = json.loads(resources.files("metainfer.planner").joinpath("gains.json").read_text())
    return tuple(
        Gain(
            family=row["family"],
            capability=tuple(row["capability"]),
            ranks=row["ranks"],
            device=row["device"],
            gains={int(tokens): gain for tokens, gain in row["gains"].items()},
            tokens=row["tokens"],
            record=row["record"],
        )
        for row in body[what]
    )


def gain_of(
    what: str, family: str, intent: Intent, facts: Facts, layout: LayoutPlan
) -> Gain | None:
    """What was measured on such cards under such a layout; None: nothing. Ranks that meet were
    measured over collectives of ours that go through host memory."""
    ranks = layout.name if talks(layout) else ALONE
    for row in shipped(what):
        if (row.family, row.capability, row.ranks) == (family, facts.device.capability, ranks):
            return row if ranks == ALONE or _through_host(intent, facts) else None
    return None


def _through_host(intent: Intent, facts: Facts) -> bool:
    asked = (intent.collectives or AUTO).partition(":")[0]
    cpu = facts.device.kind == CPU
    return asked == "host" or (asked == AUTO and not cpu and from_facts(facts).peer is False)


def against_beside(arch: Arch, layout: LayoutPlan) -> list[Reason]:
    """What stands against computing the shared expert beside the routed ones."""
    against = []
    if not any(spec.site.startswith("linear.shared") for spec in arch.packed_weights()):
        against.append(Reason("model", "the model has no shared expert"))
    if layout.expert > layout.tensor:
        text = "domains meet at the experts: the shared one is computed beside their gathers"
        against.append(Reason("layout", text))
    return against


def rows_beside(intent: Intent, arch: Arch, facts: Facts, layout: LayoutPlan) -> int:
    """Steps of at most so many tokens compute the shared expert beside: as asked for, else as
    measured where nothing stands against it."""
    if intent.shared_beside is not None:
        return intent.shared_beside
    found = gain_of(SHARED, arch.family, intent, facts, layout)
    return 0 if found is None or against_beside(arch, layout) else found.tokens
