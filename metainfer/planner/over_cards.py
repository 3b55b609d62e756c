"""How ranks of a layout meet; all of them on one card, to prove it where there is no second."""

from __future__ import annotations

from dataclasses import replace

from metainfer.comm.plan import AUTO
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.planner.emulation import Emulation
from metainfer.planner.layouts import processes, talks
from metainfer.platform.facts import CPU, CUDA, Facts


def seen_by_ranks(intent: Intent, facts: Facts, experts: int, emulation: Emulation | None) -> Facts:
    """The machine as ranks meet it: one of them alone on a device, or all on one card.

    Raises:
        UsageError: as `on_one_card`.
    """
    if emulation is not None:
        return emulation.on(facts)
    return on_one_card(intent, facts, experts) if intent.one_card else facts


def on_one_card(intent: Intent, facts: Facts, experts: int) -> Facts:
    """`facts` as ranks see them that share the first card: so many devices, each a part of it.

    Raises:
        UsageError: no layout of several ranks is asked for, or the device is no card.
    """
    ranks = processes(intent.parallel, experts)
    if ranks == 1:
        raise UsageError(
            "--one-card puts all ranks of a layout on one card, and no such layout is asked for.",
            "Add --parallel, like --parallel tp2.",
        )
    device = facts.device
    if device.kind != CUDA:
        raise UsageError(
            f"--one-card is for cards, and this device is a {device.kind}.",
            "Leave it out: ranks on a CPU share the host anyway.",
        )
    part = replace(
        device,
        memory_bytes=None if device.memory_bytes is None else device.memory_bytes // ranks,
        read_bytes_s=None if device.read_bytes_s is None else device.read_bytes_s / ranks,
        dot_flops={dtype: rate / ranks for dtype, rate in device.dot_flops.items()},
    )
    host = tuple(link for link in facts.links if link.source == -1)
    return replace(facts, devices=(part,) * ranks, links=host)


def record_collectives(
    ledger: DecisionLedger, intent: Intent, kind: str, layout: LayoutPlan
) -> None:
    """Write down by which path the ranks of a layout on devices of `kind` meet.

    Raises:
        UsageError: a way between cards is asked for, and nothing goes between cards.
    """
    asked = intent.collectives if intent.collectives != AUTO else None
    if asked is not None and (kind == CPU or not talks(layout)):
        raise UsageError(
            f"--collectives {asked} carries messages between cards, and layout {layout.name} on "
            f"{kind} has none.",
            "Leave it out, or add --parallel with a layout over cards, like --parallel tp2.",
        )
    if layout.ranks == 1:
        return
    if not talks(layout):
        path, why = "none", "replicas share nothing"
    elif kind == CPU:
        path = "shm_cpu"
        why = "processes of this host meet in its memory; sums are exact, in rank order"
    else:
        path = asked or AUTO
        why = "a rank a card; per message the cheapest that every rank could open and prove"
        if intent.one_card:
            why += "; all ranks on one card, by time slices"
    origin = Origin.DERIVED if asked is None else intent.origin("collectives")
    ledger.record("collectives", path, origin, why)
