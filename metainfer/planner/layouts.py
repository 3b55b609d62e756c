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
``tp8cs8``            as ``tp8``, the cache dealt over the 8 cards
``cp8/dp8ep8``        a pair: prompts' rows over 8 cards, then 8 attention domains
``cp8/tp8``           a pair: prompts' rows over 8 cards, then heads over 8 cards
``cp8/tp8cs8``        likewise, the cache dealt over the 8 cards
====================  =========================================================

A pair has one copy of the weights for both phases: attention whole on every card, experts as whole
ones over all cards, the vocabulary's two ends as the second part has them. Other spellings are
understood: ``dp8ep8`` of ``ep8``, ``dp8`` of ``8x``, ``cp8/tp8ep8`` of ``cp8/tp8``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum

from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Verdict, require
from metainfer.platform.facts import CPU, CUDA

SINGLE = "single"
NOT_BUILT = (
    "layouts over several cards run where --parallel names one, or the best where no card holds it"
)
MOST_PROCESSES = 8
"""Ranks that a host's CPU may be shared by; as many as collectives are built for."""


def enumerate_layouts(devices: int, experts: int) -> tuple[LayoutPlan, ...]:
    """Every layout over all devices, over the largest power of two of them, and over one.

    `experts`: experts of a layer, 0 for a model without. Nothing here is judged: what cannot be is
    refused with its reasons.
    """
    counts = sorted({1, devices, 1 << (devices.bit_length() - 1)})
    found: dict[LayoutPlan, None] = {}
    for dealt in (False, True):
        for ranks in counts:
            for tensor in _divisors(ranks):
                shards = [n for n in _divisors(tensor) if (n > 1) is dealt]
                sharing = [n for n in _divisors(ranks) if n > 1 and n % tensor == 0]
                for expert in (1, *(sharing if experts else ())):
                    found.update((_layout(ranks, tensor, expert, n), None) for n in shards)
    for ranks in counts:
        found.update((each, None) for each in pairs(ranks, experts))
    return tuple(found)


def pairs(ranks: int, experts: int) -> tuple[LayoutPlan, ...]:
    """Layouts of `ranks` ranks that compute prompts another way than decodes."""
    if ranks < 2:
        return ()
    expert = ranks if experts else 1
    apart = f"dp{ranks}ep{ranks}" if experts else f"dp{ranks}"
    halves = [(apart, 1, ranks, 1)]
    halves += [(_name(ranks, ranks, 1, n), ranks, 1, n) for n in _divisors(ranks)]
    return tuple(
        LayoutPlan(
            name=f"cp{ranks}/{name}", tensor=t, data=d, expert=expert, prefill=ranks, shards=n
        )
        for name, t, d, n in halves
    )


def named(asked: str, layouts: Iterable[LayoutPlan]) -> LayoutPlan | None:
    """The one that `asked` means, in any spelling."""
    return next((each for each in layouts if asked == each.name or asked in _spellings(each)), None)


def _spellings(layout: LayoutPlan) -> Iterator[str]:
    """What else means it: attention domains by number, experts on both sides of a pair."""
    expert = f"ep{layout.expert}" if layout.expert > 1 else ""
    tensor = f"tp{layout.tensor}" if layout.tensor > 1 else ""
    data = f"dp{layout.data}" if layout.data > 1 else ""
    shards = f"cs{layout.shards}" if layout.shards > 1 else ""
    if layout.prefill == 1:
        if data:
            yield f"{tensor}{data}{expert}{shards}"
        return
    for first in (f"cp{layout.prefill}", f"cp{layout.prefill}{expert}"):
        yield f"{first}/{tensor}{data}{expert}{shards}"
        yield f"{first}/{expert or f'{layout.data}x'}" if data else f"{first}/{tensor}{shards}"


# -- the two halves of a pair ----------------------------------------------------------------------


def of_prompts(layout: LayoutPlan) -> LayoutPlan:
    """How a pair computes chunks of prompts: as domains that share the rows of each; itself of any
    other."""
    if layout.prefill == 1:
        return layout
    name, tensor = layout.phase_name(Phase.CHUNK), layout.ranks // layout.prefill
    return replace(layout, name=name, tensor=tensor, data=layout.prefill, shards=1)


def of_decodes(layout: LayoutPlan) -> LayoutPlan:
    """How a pair computes everything else; itself of any other."""
    return replace(layout, name=layout.phase_name(Phase.DECODE), prefill=1)


def alike(layout: LayoutPlan) -> LayoutPlan:
    """The same for all layouts whose ranks compute in the same shapes."""
    if layout.prefill > 1:
        return replace(layout, name="prompts/decodes")
    return replace(layout, name="shapes", data=1)


def prompt_domains(layout: LayoutPlan) -> int:
    """Chunks of prompts that are computed at once."""
    return of_prompts(layout).data // layout.prefill


def talks(layout: LayoutPlan) -> bool:
    """Whether ranks send each other anything."""
    return max(layout.tensor, layout.expert, layout.prefill) > 1


class Fetch(StrEnum):
    """How ranks get what is cached before a chunk and lies elsewhere."""

    GATHERED = "gathered"  # each has a part of it
    LENT = "lent"  # whoever keeps a part of it sends it to all


def fetches(layout: LayoutPlan) -> Fetch | None:
    """How a chunk gets the cache before it; None where each rank has what it needs."""
    if layout.shards > 1:
        return Fetch.GATHERED
    return Fetch.LENT if layout.prefill > 1 and layout.data > 1 else None


# -- what runs -------------------------------------------------------------------------------------


def processes(asked: str | None, experts: int) -> int:
    """Ranks of the layout named `asked` on a CPU, where ranks are processes of the host; 1 for a
    name that none has."""
    for ranks in range(2, MOST_PROCESSES + 1):
        if asked is not None and named(asked, enumerate_layouts(ranks, experts)) is not None:
            return ranks
    return 1


def runs(layout: LayoutPlan, kind: str, *, asked: bool = False) -> Verdict:
    """Whether this release runs a layout on devices of `kind`, and not only plans it. `asked`: by
    name, or because there is no other way; over cards nothing else is run."""
    told = NOT_BUILT
    if asked:
        told = f"layouts over several devices run on CUDA cards and on a host, not on {kind}"
    return require(
        layout.ranks == 1 or kind == CPU or (asked and kind == CUDA),
        *("not-built", told),
        devices=layout.ranks,
    )


def _layout(ranks: int, tensor: int, expert: int, shards: int) -> LayoutPlan:
    return LayoutPlan(
        name=_name(ranks, tensor, expert, shards),
        tensor=tensor,
        data=ranks // tensor,
        expert=expert,
        shards=shards,
    )


def _name(ranks: int, tensor: int, expert: int, shards: int) -> str:
    if ranks == 1:
        return SINGLE
    copies = ranks // max(tensor, expert)
    parts = [f"{copies}x"] if copies > 1 else []
    parts += [f"tp{tensor}"] if tensor > 1 else []
    parts += [f"ep{expert}"] if expert > 1 else []
    parts += [f"cs{shards}"] if shards > 1 else []
    return "".join(parts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
