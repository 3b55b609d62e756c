"""What one card holds under a layout: weights, caches, transients, slabs, reserve; all of it.

The rows of an accelerator add up to its memory: what nothing needs is a row of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from metainfer.core.errors import RefusedError
from metainfer.core.intent import Intent
from metainfer.core.plan import DraftPlan, LayoutPlan, LedgerRow, Limits, StepGraph
from metainfer.core.verdict import Reason
from metainfer.kernels.choice import Choice
from metainfer.kernels.impl import Layout
from metainfer.kv.book.spec import CacheSpec, GroupKind, GroupSpec, form_groups
from metainfer.models.arch import Arch
from metainfer.planner import drafts, graphs
from metainfer.planner.adapters import adapter_rows
from metainfer.planner.budget import Budget
from metainfer.planner.calibration import Calibration, nothing_measured
from metainfer.planner.copies import copied_bytes
from metainfer.planner.emulation import Emulation
from metainfer.planner.gains import rows_beside
from metainfer.planner.held import Held
from metainfer.planner.layouts import fetches, of_decodes, of_prompts, talks
from metainfer.planner.limits import (
    CacheAsk,
    CacheTooSmall,
    fit_cache,
    most_running,
    passes,
)
from metainfer.planner.memory import total
from metainfer.planner.needs import MEASURED, Needs, longest_seen, needs_key, nothing_known
from metainfer.planner.rooms import room_rows
from metainfer.planner.weights import DTYPE_BYTES, Census, token_elements, weight_rows
from metainfer.platform.facts import Facts


@dataclass(slots=True, kw_only=True)
class Cards:
    """The machine's cards with the model and the limits that each layout is asked for.

    `measured`: what was measured of a single device's steps, by `calibration.key`; `needs`: of
    its memory, by `needs_key`. `emulated`: one rank alone is on this device, without its peers.
    """

    intent: Intent
    arch: Arch
    counted: Census
    facts: Facts
    dtype: str
    limits: Limits
    page_tokens: int
    draft: DraftPlan
    threads: int = 1
    measured: Callable[[str], Calibration | None] = nothing_measured
    needs: Callable[[str], Needs | None] = nothing_known
    emulated: Emulation | None = None
    _caches: dict[tuple[object, ...], tuple[tuple[CacheSpec, ...], tuple[GroupSpec, ...]]] = field(
        default_factory=dict
    )
    _known: dict[tuple[tuple[str, str], ...], Needs | None] = field(default_factory=dict)
    _weights: dict[tuple[object, ...], tuple[LedgerRow, ...]] = field(default_factory=dict)

    def hold(
        self,
        layout: LayoutPlan,
        packings: Mapping[str, Layout],
        running: int | None = None,
        choices: Sequence[Choice] = (),
    ) -> Held:
        """Everything in one bundle's packings; `running`: sequences of a domain, if not its share;
        `choices`: the bundle's, for what they copy.

        Raises:
            RefusedError: it does not fit, or states cannot take back the drafts.
        """
        weights, beside, ask = self._asked(layout, packings, running, choices)
        try:
            cache = fit_cache(ask)
        except CacheTooSmall as refusal:
            refusal.keeps = lambda context, running: self._keeps(
                layout, packings, choices, context, running
            )
            raise
        needs = self._needs(layout, packings)
        device = [row for row in (*weights, *beside) if row.memory == "device"]
        beside = (*beside, *self._budget(layout, needs).rest(total(device) + cache.sizes.bytes()))
        specs, groups = self._groups(of_decodes(layout), packings)
        prompts, _ = self._groups(of_prompts(layout), packings)
        return Held(
            layout=layout,
            weights=weights,
            specs=specs,
            prompt_specs=prompts,
            groups=groups,
            cache=cache,
            beside=beside,
            budget_bytes=ask.budget_bytes,
            wanted=self._wanted(layout, ask.running, choices),
            prefill_from=self._short(layout, ask.running, choices),
            measured=needs,
        )

    def _keeps(
        self,
        layout: LayoutPlan,
        packings: Mapping[str, Layout],
        choices: Sequence[Choice],
        context: int,
        running: int,
    ) -> bool:
        """Whether `hold` would succeed with that context and so many sequences of a domain."""
        other = replace(self, limits=replace(self.limits, max_context=context))
        try:
            *_, ask = other._asked(layout, packings, running, choices)
        except RefusedError:
            return False
        return passes(ask)

    def most_running(
        self, layout: LayoutPlan, packings: Mapping[str, Layout], choices: Sequence[Choice] = ()
    ) -> int:
        """Sequences of a domain, at most its share, with which `hold` succeeds; 0 for none."""
        try:
            *_, ask = self._asked(layout, packings, None, choices)
        except RefusedError:
            return 0
        return most_running(ask)

    def _asked(
        self,
        layout: LayoutPlan,
        packings: Mapping[str, Layout],
        running: int | None,
        choices: Sequence[Choice],
    ) -> tuple[tuple[LedgerRow, ...], tuple[LedgerRow, ...], CacheAsk]:
        """Weights, what stands beside weights and cache, and what is left to ask of the cache."""
        weights = [*self._weight_rows(layout, packings)]
        rank = self._rank(layout)
        tables = rank.table_bytes(self.limits.max_context)
        weights.append(LedgerRow(item="rotary tables", kind="weights", bytes=tables))
        weights += adapter_rows(rank.adapters, DTYPE_BYTES[self.dtype])
        _, groups = self._groups(of_decodes(layout), packings)
        drafts.check_rewind(self.draft, groups)
        needs = self._needs(layout, packings)
        beside = (
            self._activations(layout, needs, running or self.running(layout), choices),
            *self._fetched(layout, packings),
            *self._copied(choices, running or self.running(layout), needs),
            *self._rooms(layout),
            *self._graphs(layout, groups, running or self.running(layout), needs, choices),
        )
        held = total([row for row in (*weights, *beside) if row.memory == "device"])
        budget, most = self._budget(layout, needs).of_cache(held)
        ask = CacheAsk(
            groups=groups,
            budget_bytes=budget,
            context=self.limits.max_context,
            running=running or self.running(layout),
            step_tokens=self.limits.step_tokens,
            caching=self.intent.prefix_cache,
            domains=layout.data,
            most_bytes=most if most is not None and most > budget else None,
        )
        return tuple(weights), beside, ask

    def _weight_rows(
        self, layout: LayoutPlan, packings: Mapping[str, Layout]
    ) -> tuple[LedgerRow, ...]:
        """Counted once for all layouts that cut weights alike."""
        ids = tuple(sorted((role, packing.id) for role, packing in packings.items()))
        key = (layout.tensor, layout.expert, layout.prefill, ids)
        if key not in self._weights:
            rows = weight_rows(self.counted, packings, self.dtype, layout)
            self._weights[key] = tuple(rows)
        return self._weights[key]

    def _rank(self, layout: LayoutPlan) -> Arch:
        return self.arch if layout.tensor == 1 else self.arch.on_rank(layout)

    def against_dealing(
        self, layout: LayoutPlan, packings: Mapping[str, Layout]
    ) -> tuple[Reason, ...]:
        """Why pages cannot be dealt over `layout.shards` ranks: they do not divide. Whether ranks
        hold the same is the family's to say (`Arch.layout_objections`)."""
        found = []
        _, groups = self._groups(of_decodes(layout), packings)
        for group in groups:
            if group.page_entries % group.shards:
                text = (
                    f"a page holds {group.page_entries} entries of {group.name}, which "
                    f"{group.shards} ranks do not divide"
                )
                data = {"group": group.name, "have": group.page_entries, "ranks": group.shards}
                found.append(Reason("shards", text, data))
        return tuple(found)

    def here(self, layout: LayoutPlan) -> int:
        """Ranks that share the host where it is the device: processes of it."""
        return 1 if self.emulated is not None else layout.ranks

    def running(self, layout: LayoutPlan) -> int:
        """Sequences that one domain runs at once."""
        return -(-self.limits.max_running // layout.data)

    def _short(self, layout: LayoutPlan, running: int, choices: Sequence[Choice]) -> int:
        """Of a pair, prompt tokens below which a step is computed as decodes are: as asked for, or
        as far as such steps are captured. `running`: sequences of a domain, without their drafts.
        """
        if layout.prefill == 1:
            return 0
        if self.intent.prefill_from is not None:
            return self.intent.prefill_from
        wanted = self._wanted(layout, running, choices)
        return graphs.border(graphs.capturable(wanted, choices))

    def _groups(
        self, layout: LayoutPlan, packings: Mapping[str, Layout]
    ) -> tuple[tuple[CacheSpec, ...], tuple[GroupSpec, ...]]:
        names = {role: packing.id for role, packing in packings.items()}
        held = [names.get(role) for role in ("kv", "index")]
        key = (layout.tensor, layout.shards, *held)
        if key not in self._caches:
            specs = self._rank(layout).cache_specs(self.dtype, names)
            groups = form_groups(specs, page_tokens=self.page_tokens)
            self._caches[key] = (specs, tuple(_dealt(group, layout.shards) for group in groups))
        return self._caches[key]

    def _needs(self, layout: LayoutPlan, packings: Mapping[str, Layout]) -> Needs | None:
        """What steps were measured to need; of a single rank, as they are measured."""
        if self.needs is nothing_known or layout.ranks > 1 or self.emulated is not None:
            return None
        names = {role: packing.id for role, packing in packings.items()}
        key = tuple(sorted(names.items()))
        if key not in self._known:
            asked = needs_key(self.arch, self.dtype, names, self.threads)
            self._known[key] = self.needs(asked)
        return self._known[key]

    def _activations(
        self, layout: LayoutPlan, needs: Needs | None, running: int, choices: Sequence[Choice]
    ) -> LedgerRow:
        """Of the steps that take the most. `running`: sequences of a domain."""
        step, width = self.limits.step_tokens, DTYPE_BYTES[self.dtype]
        if needs is not None:
            held = needs.transient_bytes(step, longest_seen(self.limits))
            item = f"activations of {step} tokens {MEASURED}"
            return LedgerRow(item=item, kind="transient", bytes=held)
        decoding = min(step, running * (1 + self.draft.depth))
        steps = [(of_decodes(layout), step, decoding)]
        if layout.prefill > 1:
            border = self._short(layout, running, choices)
            mixed = min(step, max(border - 1, 0) + decoding)
            part = -(-step // layout.prefill)
            steps = [(of_decodes(layout), mixed, decoding), (of_prompts(layout), part, 1)]
        most, tokens = max(
            (self._rank(half).activation_bytes(rows, scored, width), rows)
            for half, rows, scored in steps
        )
        return LedgerRow(item=f"activations of {tokens} tokens", kind="transient", bytes=most)

    def _fetched(self, layout: LayoutPlan, packings: Mapping[str, Layout]) -> list[LedgerRow]:
        """What a rank lacks of one layer's cache, for a prompt of the longest context."""
        specs, groups = self._groups(of_prompts(layout), packings)
        kept, _ = self._groups(of_decodes(layout), packings)
        if not fetches(layout) and specs == kept:
            return []
        layers: Counter[int] = Counter()
        for group in groups:
            if group.kind is GroupKind.PAGED and (group.deals or layout.shards == 1):
                each = -(-self.limits.max_context // group.tokens_per_entry) * group.form.bytes
                layers.update(dict.fromkeys(group.layers, each))
        held = max(layers.values(), default=0)
        item = "a layer's cache, fetched for prompts"
        return [LedgerRow(item=item, kind="transient", bytes=held)]

    def _copied(
        self, choices: Sequence[Choice], running: int, needs: Needs | None
    ) -> list[LedgerRow]:
        """What attention copies of the cache for the largest chunk, of whichever kernel copies the
        most: of every request, where one alone was measured of the others."""

        def most(requests: int) -> int:
            return max(
                (copied_bytes(each, self.facts, self.limits, requests) for each in choices),
                default=0,
            )

        held = most(running) - (most(1) if needs is not None else 0)
        item = "copies of cached entries" + (" of further requests" if needs is not None else "")
        return [LedgerRow(item=item, kind="transient", bytes=held)] if held else []

    def _graphs(
        self,
        layout: LayoutPlan,
        groups: tuple[GroupSpec, ...],
        running: int,
        needs: Needs | None,
        choices: Sequence[Choice],
    ) -> list[LedgerRow]:
        """What captured steps take, if every op can be captured; where that was measured of these
        very steps, with what libraries keep."""
        shapes, context = self._wanted(layout, running, choices), self.limits.max_context
        side = rows_beside(self.intent, self.arch, self.facts, layout)
        known = None if needs is None else needs.standing(graphs.key(shapes, context, side))
        if known is not None:
            item = f"{graphs.STANDING} {MEASURED}"
            return [LedgerRow(item=item, kind="graphs", bytes=known)]
        rank, width = self._rank(of_decodes(layout)), DTYPE_BYTES[self.dtype]
        row = graphs.graph_row(shapes, rank, groups, context, width)
        return [] if row is None else [row]

    def _wanted(
        self, layout: LayoutPlan, running: int, choices: Sequence[Choice] = ()
    ) -> tuple[StepGraph, ...]:
        """What is captured, if every op can be."""
        if not self.intent.graphs:
            return ()
        device, costs, longest = self.facts.device, self.arch.costs(), graphs.SHORT_CHUNK
        if costs is not None:
            dense, _, routed = token_elements(self.counted, costs, layout.decoding)
            launches, rate = self.arch.layers * costs.layer_launches, device.dot_flops
            longest = graphs.launch_bound(
                launches, 2 * (dense + routed), rate.get(self.dtype), talks=talks(layout)
            )
        border = self.intent.prefill_from
        if layout.prefill > 1 and border is not None:
            longest = min(longest, border - 1)
        shapes = graphs.wanted(device.kind, running, self.limits, self.draft, layout, longest)
        return graphs.by_length(shapes, choices)

    def _budget(self, layout: LayoutPlan, needs: Needs | None) -> Budget:
        return Budget(
            intent=self.intent,
            facts=self.facts,
            layout=layout,
            sharing=self.here(layout),
            needs=needs,
        )

    def _rooms(self, layout: LayoutPlan) -> list[LedgerRow]:
        """Through what ranks meet."""
        costs = self.arch.costs()
        row = costs.hidden * DTYPE_BYTES[self.dtype] if costs is not None else 0
        return room_rows(layout, self.facts, self.intent, self.limits.step_tokens, row)


def _dealt(group: GroupSpec, shards: int) -> GroupSpec:
    """Entries of whole sequences are dealt over ranks, unless too few; the rest is on each."""
    dealt = group.kind is GroupKind.PAGED and group.deals
    return replace(group, shards=shards) if dealt else group
