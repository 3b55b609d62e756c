"""One rank's part of a model under one layout, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.core.plan import LayoutPlan
from metainfer.kv.book.spec import CacheSpec, GroupKind
from metainfer.models.arch import Costs
from metainfer.planner.held import Held
from metainfer.planner.layouts import Fetch, fetches, of_decodes, of_prompts
from metainfer.planner.weights import DTYPE_BYTES, EMBED, EXPERTS, HEAD, Census, token_elements

TABLES = "rotary tables"
INDEX = "index"
"""Name of caches of keys that choose: each rank of a dealt cache chooses from its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's part of a model under one layout, in numbers.

    `dense`, `head`, `routed`: matrix elements that a token passes on this rank. `dense_bytes`: read
    in every step; `expert_bytes`: all routed experts of this rank. `width`: bytes of an activation
    element. `specs`: caches whose bytes `costs` counts.

    `token_bytes`: what a token adds to paged caches over all layers; `edge_bytes`: windows and
    states that a part of a chunk needs of the part before it. `paged_layers`, `choosing_layers`:
    those with paged caches, and with index keys. `dealt_layers`, `dealt_bytes`: of what may be
    dealt, layers and what a token adds. `fetches`: how what is cached before a chunk comes to ranks
    that lack it. `rounded_from`: from so many rows on, domains round what they send to experts; 0:
    never.
    """

    layout: LayoutPlan
    layers: int
    vocab: int
    experts: int
    width: int
    dense: float
    head: float
    routed: float
    dense_bytes: float
    expert_bytes: float
    costs: Costs
    specs: tuple[CacheSpec, ...] = ()
    token_bytes: float = 0.0
    edge_bytes: float = 0.0
    paged_layers: int = 0
    choosing_layers: int = 0
    dealt_layers: int = 0
    dealt_bytes: float = 0.0
    fetches: Fetch | None = None
    rounded_from: int = 0


def rank_work(
    counted: Census,
    held: Held,
    costs: Costs,
    dtype: str,
    *,
    prompts: bool = False,
    rounded_from: int = 0,
) -> RankWork:
    """The work of a model whose headers were counted, as one card holds it.

    `prompts`: of chunks of prompts, where they are computed another way than decodes.
    `rounded_from`: as in the result.
    """
    layout = of_prompts(held.layout) if prompts else of_decodes(held.layout)
    arch, elements = counted.arch, counted.elements(layout)
    dense, head, passed = token_elements(counted, costs, layout)
    kept = counted.elements(held.layout)
    routed = [site for site in elements if site.startswith(f"{EXPERTS}.")]
    # A half that cuts a matrix further than it is held reads its part of it.
    parts = {site: min(1.0, count / kept[site]) for site, count in elements.items() if count}
    sites = {row.item: row.bytes * parts.get(row.item, 1.0) for row in held.weights}
    expert_bytes = sum(sites.get(site, 0) for site in routed)
    embedding = sites.get(EMBED, 0) if HEAD in sites else 0  # a tied head is read where it is held
    specs = held.prompt_specs if prompts else held.specs
    paged = [spec for spec in specs if spec.kind is GroupKind.PAGED and not spec.borrows]
    return RankWork(
        layout=layout,
        layers=arch.layers,
        vocab=arch.vocab_size,
        experts=max(arch.routed_experts, 1),
        width=DTYPE_BYTES[dtype],
        dense=dense,
        head=head,
        routed=passed,
        dense_bytes=sum(sites.values()) - expert_bytes - embedding - sites.get(TABLES, 0),
        expert_bytes=expert_bytes,
        costs=costs,
        specs=specs,
        token_bytes=sum(spec.form.bytes / spec.tokens_per_entry for spec in paged),
        edge_bytes=_edge_bytes(specs),
        paged_layers=len({spec.layer for spec in paged}),
        dealt_layers=len({spec.layer for spec in paged if spec.deals}),
        dealt_bytes=sum(s.form.bytes / s.tokens_per_entry for s in paged if s.deals),
        choosing_layers=len({spec.layer for spec in paged if spec.name == INDEX}),
        # Heads that a rank does not keep are lent by those that do.
        fetches=fetches(held.layout) or (Fetch.LENT if held.prompt_specs != held.specs else None),
        rounded_from=rounded_from,
    )


def _edge_bytes(specs: Sequence[CacheSpec]) -> float:
    held = 0
    for spec in specs:
        if not spec.borrows and spec.kind is not GroupKind.PAGED:
            held += spec.state_bytes or spec.window * spec.form.bytes
    return float(held)
