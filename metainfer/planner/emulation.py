"""One rank of several on one device: whose rank it is, and how the others are reached there.

The device computes one rank's part in its own shapes; its peers are not there. What they would cost
comes from the tree of the machine that is named, through `comm.model`. Never a plan that answers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from metainfer.comm.plan import AUTO
from metainfer.comm.topology import Topology, from_facts
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.platform.facts import CPU, Facts
from metainfer.platform.machine_catalog import find_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """Rank 0 of `ranks` of the machine named `machine`. `tree`: its links; `memory_bytes`: one of
    its cards', None where it is unknown; `method`: the backend whose price is waited for."""

    ranks: int
    machine: str
    tree: Topology
    memory_bytes: int | None
    method: str = AUTO

    def values(self) -> dict[str, object]:
        """What the plan says of it."""
        return {
            "rank": 0,
            "ranks": self.ranks,
            "machine": self.machine,
            "collectives": self.method,
        }

    def on(self, facts: Facts) -> Facts:
        """The device here, with no more memory than a card there has."""
        device, most = facts.device, self.memory_bytes
        if device.kind == CPU or most is None or device.memory_bytes is None:
            return dataclasses.replace(facts, devices=(device,))
        held = min(device.memory_bytes, most)
        return dataclasses.replace(facts, devices=(dataclasses.replace(device, memory_bytes=held),))


def emulates(layout: LayoutPlan, ranks: int) -> bool:
    """Whether one of `ranks` ranks can be alone under a layout; the rows of a pair's chunks are
    dealt over ranks that would not be there, and so is a cache in shards."""
    return layout.ranks == ranks and layout.prefill == layout.shards == 1


def record_emulation(ledger: DecisionLedger, emulated: Emulation, asked: Origin) -> None:
    """Whose rank it is, and what stands in for its peers."""
    guessed = "; ".join(emulated.tree.assumed)
    why = "asked for: its answers mean nothing, its times are those of one rank"
    ledger.record("emulated", emulated.values(), asked, f"{why}; {guessed}" if guessed else why)
    said = f"predicted for {emulated.machine} and waited for; what peers bring is a stand-in"
    ledger.record("collectives", "emulated", Origin.COST_MODEL, said)


def emulation_of(intent: Intent) -> Emulation | None:
    """What `intent` asks to emulate; None where it asks for the real thing.

    Raises:
        UsageError: the machine is not named, is not known, or has no such number of cards.
    """
    if intent.rank_of is None:
        if intent.of_machine is not None:
            raise UsageError(
                f"--machine {intent.of_machine} says whose rank is emulated, and none is.",
                "Add --rank-of N, or leave it out.",
            )
        return None
    if intent.of_machine is None:
        raise UsageError(
            f"--rank-of {intent.rank_of} does not say of which machine.",
            "Add --machine NAME: plan, serve and bench offline take it.",
        )
    machine = find_machine(intent.of_machine)
    tree = from_facts(machine.facts)
    if not 2 <= intent.rank_of <= tree.world:
        raise UsageError(
            f"--rank-of {intent.rank_of} is no number of ranks of {machine.name}, which has "
            f"{tree.world} cards.",
            f"Pass 2 to {tree.world}." if tree.world > 1 else "Name another machine.",
        )
    return Emulation(
        ranks=intent.rank_of,
        machine=machine.name,
        tree=tree.first(intent.rank_of),
        memory_bytes=machine.facts.device.memory_bytes,
        method=intent.collectives or AUTO,
    )
