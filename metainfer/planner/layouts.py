"""Which ways there are to spread a model over a machine's cards: enumerated, named, in order.

A layout of `tensor` x `data` ranks: `data` attention domains of `tensor` ranks each, every domain
with a cache of its own; experts are cut over `expert` ranks, or with each expert's matrices over
the tensor ranks (`expert` 1). Groups that share no weight are replicas.

====================  =========================================================
``single``            one card
``tp8``               every matrix over 8 cards
``ep8``               8 attention domains, the experts over all 8 cards
``tp2ep8``            4 domains of 2 cards, the experts over all 8
``tp8ep8``            one domain of 8 cards, whole experts on each
``2xtp4``, ``8x``     replicas: each a layout of its own
====================  =========================================================
"""

from __future__ import annotations

from metainfer.core.plan import DraftPlan, LayoutPlan
from metainfer.core.verdict import Verdict, all_of, require
from metainfer.planner.drafts import MODEL
from metainfer.platform.facts import CPU

SINGLE = "single"
NOT_BUILT = "layouts over several cards are not built yet"
MOST_PROCESSES = 8
"""Ranks that a host's CPU may be shared by; as many as collectives are built for."""


def enumerate_layouts(devices: int, experts: int) -> tuple[LayoutPlan, ...]:
    """Every layout over all devices, over the largest power of two of them, and over one.

    `experts`: experts of a layer, 0 for a model without. Nothing here is judged: what cannot be is
    refused with its reasons.
    """
    counts = {1: None, devices: None, 1 << (devices.bit_length() - 1): None}
    found: dict[LayoutPlan, None] = {}
    for ranks in sorted(counts):
        for tensor in _divisors(ranks):
            sharing = [n for n in _divisors(ranks) if n > 1 and n % tensor == 0]
            for expert in (1, *(sharing if experts else ())):
                found[_layout(ranks, tensor, expert)] = None
    return tuple(found)


def processes(asked: str | None, experts: int) -> int:
    """Ranks of the layout named `asked` on a CPU, where ranks are processes of the host; 1 for a
    name that none has."""
    for ranks in range(2, MOST_PROCESSES + 1):
        if asked in [layout.name for layout in enumerate_layouts(ranks, experts)]:
            return ranks
    return 1


def runs(layout: LayoutPlan, kind: str, draft: DraftPlan) -> Verdict:
    """Whether this release runs a layout on devices of `kind`, and not only plans it."""
    several, meet = layout.ranks > 1, layout.expert > layout.tensor
    drafted = "a drafting model's ranks would meet at experts in steps that not all of them take"
    return all_of(
        [
            require(not several or kind == CPU, "not-built", NOT_BUILT, devices=layout.ranks),
            require(not (meet and draft.method == MODEL), "draft", drafted),
        ]
    )


def replicas(layout: LayoutPlan) -> int:
    """Groups of ranks that share no weight."""
    return layout.ranks // max(layout.tensor, layout.expert)


def _layout(ranks: int, tensor: int, expert: int) -> LayoutPlan:
    return LayoutPlan(
        name=_name(ranks, tensor, expert), tensor=tensor, data=ranks // tensor, expert=expert
    )


def _name(ranks: int, tensor: int, expert: int) -> str:
    if ranks == 1:
        return SINGLE
    copies = ranks // max(tensor, expert)
    parts = [f"{copies}x"] if copies > 1 else []
    parts += [f"tp{tensor}"] if tensor > 1 else []
    parts += [f"ep{expert}"] if expert > 1 else []
    return "".join(parts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
