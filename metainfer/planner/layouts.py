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
``cp8/dp8ep8``        a pair: prompts' rows over 8 cards, then 8 attention domains
``cp8/tp8``           a pair: prompts' rows over 8 cards, then heads over 8 cards
====================  =========================================================

A pair has one copy of the weights for both phases: attention whole on every card, experts as whole
ones over all cards, the vocabulary's two ends as the second part has them.
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


def pairs(ranks: int, experts: int) -> tuple[LayoutPlan, ...]:
    """Layouts of `ranks` ranks that compute prompts another way than decodes."""
    if ranks < 2:
        return ()
    expert = ranks if experts else 1
    apart = f"dp{ranks}ep{ranks}" if experts else f"dp{ranks}"
    return tuple(
        LayoutPlan(name=f"cp{ranks}/{name}", tensor=t, data=d, expert=expert, prefill=ranks)
        for name, t, d in ((apart, 1, ranks), (f"tp{ranks}", ranks, 1))
    )


def by_wish(asked: str | None, devices: int, experts: int) -> tuple[LayoutPlan, ...]:
    """Layouts that are judged when they are asked for by name."""
    return tuple(each for each in pairs(devices, experts) if each.name == asked)


def processes(asked: str | None, experts: int) -> int:
    """Ranks of the layout named `asked` on a CPU, where ranks are processes of the host; 1 for a
    name that none has."""
    for ranks in range(2, MOST_PROCESSES + 1):
        listed = (*enumerate_layouts(ranks, experts), *by_wish(asked, ranks, experts))
        if asked in [layout.name for layout in listed]:
            return ranks
    return 1


def runs(layout: LayoutPlan, kind: str, draft: DraftPlan) -> Verdict:
    """Whether this release runs a layout on devices of `kind`, and not only plans it."""
    several, meet = layout.ranks > 1, layout.expert > layout.tensor
    drafts = draft.method == MODEL
    drafted = "a drafting model's ranks would meet at experts in steps that not all of them take"
    spread = "a drafting model reads every row of a chunk, of which a rank has a part"
    return all_of(
        [
            require(not several or kind == CPU, "not-built", NOT_BUILT, devices=layout.ranks),
            require(layout.prefill == 1, "not-built", "pairs are planned, not run yet"),
            require(not (meet and drafts), "draft", drafted),
            require(not (layout.prefill > 1 and drafts), "draft", spread),
        ]
    )


def replicas(layout: LayoutPlan) -> int:
    """Groups of ranks that share no weight."""
    return layout.ranks // max(layout.tensor, layout.expert, layout.prefill, layout.context)


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
