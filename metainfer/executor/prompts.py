"""Chunks whose rows ranks share: this rank's rows through the model, its domain's answers out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from metainfer.comm.peers import Peers, Place, Ranks
from metainfer.comm.side import Turns
from metainfer.core.plan import LayoutPlan, Plan
from metainfer.core.step import ALL_LAYERS, NO_ADAPTER, RunResult, Segment
from metainfer.executor.halves import halves_of
from metainfer.executor.inputs import adapter_rows
from metainfer.executor.model_drafts import ModelDrafts
from metainfer.executor.prompt_drafts import Computed, PromptDrafts
from metainfer.executor.sampler import fail_silent, finish_runs
from metainfer.executor.slots import SlotTable
from metainfer.executor.spread import Ints, Keeping, Rows, tables
from metainfer.executor.transfer import to_device
from metainfer.kernels.table import PhaseOps
from metainfer.kv.book.spec import GroupSpec
from metainfer.kv.store.pools import KVStore
from metainfer.models.common.inputs import GroupInputs, SegmentInputs
from metainfer.models.common.lanes import interleave
from metainfer.models.common.spread import Part, Spread
from metainfer.ops.linear.packed import PackedWeight

MakeDrafts = Callable[[Any, Mapping[str, PackedWeight], Mapping[str, Tensor]], ModelDrafts]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRanks:
    """`model` has whole matrices, in `parts` parts; `decoder` is the model of decodes, whose head
    makes logits. `peers` share the rows; `domain`: this rank's, of `domains`. Chunks of at least
    `halves` tokens are computed as two halves in `turns`, of at least `beside` whole with what goes
    between ranks beside them; 0: none. `moved`: bytes that came from others, by what they were.
    `drafts`: what drafts behind chunks. `adapters`: how many are loaded."""

    model: Any
    decoder: Any
    store: KVStore
    groups: Sequence[GroupSpec]
    device: torch.device
    peers: Peers
    domain: int
    domains: int
    parts: int
    keeping: Keeping
    shards: Peers
    halves: int
    beside: int
    turns: Turns
    moved: Counter[str] = field(default_factory=Counter)
    drafts: PromptDrafts | None = None
    adapters: int = 0

    def run(
        self, segment: Segment, slots: SlotTable, ops: PhaseOps, *, guard: bool
    ) -> list[RunResult]:
        """Compute a segment of chunks; results of the runs of this rank's domain."""
        tokens = sum(rank.tokens for rank in segment.ranks)
        long, beside = (0 < least <= tokens for least in (self.halves, self.beside))
        parts = halves_of(segment) if long else (segment,)
        with self.turns if long or beside else nullcontext():
            found = self.computed(parts, slots, ops)
        own = segment.ranks[self.domain].runs
        results = [RunResult(run.slot) for run in own]
        answers = torch.cat([self._answers(each.rows, self._normed(each)) for each in found])
        if len(answers):
            logits = self.decoder.head(answers, ops)
            results = finish_runs(logits, own, slots, ops, guard=guard)
        if guard:
            finite = torch.cat([self._finite(each.rows, self._normed(each)) for each in found])
            fail_silent(finite.tolist(), own, results)
        if self.drafts is not None and segment.stop_layer == ALL_LAYERS:
            (whole,) = found  # no halves beside a model that drafts
            self.drafts.propose(segment, whole, results, slots, ops)
        return results

    def drafted_by(self, make: MakeDrafts, parts: Sequence[Part], drafter: ModelDrafts) -> Self:
        """The same with `drafter`, which drafts behind decodes. `make`: another, of a model and its
        weights (packed, plain) over the same cache."""
        drafts = PromptDrafts(
            reader=make(self.model, *parts[0]),
            drafter=drafter,
            peers=self.peers,
            device=self.device,
            moved=self.moved,
        )
        return replace(self, drafts=drafts)

    def computed(self, parts: Sequence[Segment], slots: SlotTable, ops: PhaseOps) -> list[Computed]:
        """This rank's rows of each of `parts`, lanes that take turns."""
        rows = [Rows(part, self.peers.rank, self.peers.size, self.domain) for part in parts]
        inputs = [self._inputs(each, slots) for each in rows]
        lanes = [
            self.model.lane(each, self.store.layers, ops, part.stop_layer)
            for each, part in zip(inputs, parts, strict=True)
        ]
        return [Computed(*each) for each in zip(rows, inputs, interleave(lanes), strict=True)]

    def _normed(self, part: Computed) -> Tensor:
        """Own rows [m, D] as the head reads them."""
        normed: Tensor = self.model.normed(part.hidden)
        return normed

    def _finite(self, rows: Rows, normed: Tensor) -> Tensor:
        """bool: of each row of this domain's runs, whoever computed it."""
        flags = torch.isfinite(normed.flatten(1)).all(dim=1).to(torch.uint8)  # [m]
        return self.peers.rows(flags)[to_device(_rows_of_own(rows), self.device)].bool()

    def _answers(self, rows: Rows, normed: Tensor) -> Tensor:
        """Rows [R, D] of this domain's runs that need logits, whoever computed them."""
        wanted = [
            np.arange(rows.starts[n + 1] - each.run.logits, rows.starts[n + 1])
            for n, each in enumerate(rows.runs)
        ]
        mine, places = rows.given(np.concatenate(wanted))
        if not len(mine):
            return normed[:0]
        owned = np.repeat([each.own for each in rows.runs], [len(each) for each in wanted])
        gathered = self.peers.rows(normed[to_device(mine, self.device)])
        return gathered[to_device(places[owned], self.device)]

    def _inputs(self, rows: Rows, slots: SlotTable) -> SegmentInputs:
        found = tables(rows, self.groups, slots, self.keeping)
        pieces = rows.pieces()
        begins = rows.starts[pieces.start : pieces.stop + 1].clip(rows.begin, rows.end)
        ends = rows.starts[pieces.start + 1 : pieces.stop + 1].clip(rows.begin, rows.end)
        lens = rows.positions[ends - 1] + 1
        groups = tuple(
            GroupInputs(
                None if pages is None else to_device(pages, self.device),
                to_device(where, self.device),
            )
            for pages, where, _ in found
        )
        apart = self.parts if self.keeping is Keeping.HEADS else 1  # else all keep the same
        parts = [
            [each.of_part(part, rows.rank, self.keeping, self.device) for *_, each in found]
            for part in range(apart)
        ] * (self.parts // apart)
        positions = rows.padded(rows.positions[rows.begin : rows.end], 0)
        places = self._places(rows, slots)
        starts = begins - rows.begin if len(pieces) else np.zeros(1, np.int64)
        return SegmentInputs(
            to_device(rows.ids(), self.device),
            to_device(positions, self.device),
            to_device(starts.astype(np.int32), self.device),
            to_device(lens.astype(np.int32), self.device),
            groups,
            None,
            None if places is None else adapter_rows(places, lambda x: to_device(x, self.device)),
            spread=Spread(self.peers, parts, self.moved, self.shards),
        )

    def _places(self, rows: Rows, slots: SlotTable) -> Ints | None:
        """The place of each own row's adapter; None where the model has none, or no row."""
        if not self.adapters:
            return None
        states = (slots.states[each.run.slot] if each.own else None for each in rows.runs)
        known = [NO_ADAPTER if state is None else state.adapter for state in states]
        of_run = rows.told(np.array(known, np.int64), self._places_of_all)
        places = rows.padded(of_run[rows.run_of][rows.begin : rows.end], NO_ADAPTER)
        return None if (places == NO_ADAPTER).all() else places

    def _places_of_all(self, known: Ints) -> Ints:
        self.moved["adapters"] += (self.peers.size - 1) * known.nbytes
        every: Ints = self.peers.rows(to_device(known, self.device)).cpu().numpy()
        return every


def prompt_ranks(
    model: Any,
    parts: Sequence[Part],
    store: KVStore,
    groups: Sequence[GroupSpec],
    place: Place | None,
    ranks: Ranks,
    device: torch.device,
    plan: Plan,
) -> PromptRanks | None:
    """Beside the `model` of decodes, where a layout's ranks share the rows of chunks; else None."""
    if place is None or place.layout.prefill == 1:
        return None
    return PromptRanks(
        model=model.for_prompts(parts, ranks),
        decoder=model,
        store=store,
        groups=groups,
        device=device,
        peers=ranks.prompts,
        domain=place.domain,
        domains=place.layout.data,
        parts=len(parts),
        keeping=_keeping(place.layout, groups),
        shards=ranks.shards,
        halves=plan.halves,
        beside=plan.gathers_beside,
        turns=ranks.turns,
        adapters=len(plan.adapters),
    )


def _keeping(layout: LayoutPlan, groups: Sequence[GroupSpec]) -> Keeping:
    """Where a request's cache lies; one latent for all heads is on every rank of a domain."""
    if layout.data > 1:
        return Keeping.DOMAINS
    by_heads = all(group.form.parts == 2 for group in groups)
    return Keeping.HEADS if by_heads else Keeping.EVERYWHERE


def _rows_of_own(rows: Rows) -> Ints:
    """Rows of the segment that belong to this rank's domain, in order."""
    owned = np.array([each.own for each in rows.runs], np.bool_)
    return np.flatnonzero(owned[rows.run_of])
