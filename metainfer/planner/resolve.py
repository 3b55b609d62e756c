"""Intent to plan: the one place where values are decided, each with its author and its reason.

Pure: facts, checkpoint index and records in, a frozen plan out. No device, no weights, no torch;
the same function serves `plan`, `doctor` and `serve`, so that what is shown is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import DECISIONS, GOALS, Intent
from metainfer.core.ledger import Decision, DecisionLedger, Origin
from metainfer.core.plan import DraftPlan, GroupPlan, LayoutPlan, Limits, ModelPlan, OpPlan, Plan
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.kernels.choice import Policy, Selection
from metainfer.kernels.impl import OpRequest
from metainfer.kernels.registry import Registry
from metainfer.kernels.select import Outcomes, select
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.spec import GroupSpec
from metainfer.models.arch import Arch
from metainfer.planner import (
    adapters,
    chunks,
    dispatch,
    drafts,
    grammars,
    graphs,
    lanes,
    overlap,
    pairs,
    shares,
)
from metainfer.planner.calibration import Calibration, nothing_measured
from metainfer.planner.candidate import Candidate
from metainfer.planner.cards import Cards
from metainfer.planner.emulation import Emulation
from metainfer.planner.fitting import DOES_NOT_FIT
from metainfer.planner.held import Held
from metainfer.planner.layouts import alike, of_decodes
from metainfer.planner.needs import Needs, nothing_known
from metainfer.planner.over_cards import seen_by_ranks
from metainfer.planner.record import record_needs, record_selection
from metainfer.planner.search import NoLayout, lacking, search, unbuilt
from metainfer.planner.weights import DTYPE_BYTES, WHOLE, Census, census, parts_held
from metainfer.planner.wishes import Wishes
from metainfer.platform.facts import Facts

PLANNED_ONLY = "planned_only"
PHASES = (Phase.CHUNK, Phase.MIXED, Phase.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the resolver may know of a model: its arch, how each tensor is stored, and the draft
    module that it brings along. `missing`: what this release lacks to run its family."""

    reference: str
    arch: Arch
    scheme_of: Callable[[str], str]
    parameters: int
    draft: drafts.DraftModule | None = None
    missing: tuple[str, ...] = ()

    def refusal(self) -> RefusedError | None:
        """Why this release runs the model on no machine; None where it may."""
        if not self.missing:
            return None
        return RefusedError(
            f"{self.arch.family} models are planned only: this release cannot run them.",
            "Look at it with plan; docs/models.md lists what is served.",
            reasons=tuple(Reason("not-built", f"there is not yet: {a}") for a in self.missing),
            code=PLANNED_ONLY,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The plan and what it was made from, for the executor, the scheduler and `doctor`.

    `layouts`: every layout that was judged, the plan's among them. `device_bytes`: one card's
    memory, where it is known. `lacking`: why this release runs the model nowhere.
    """

    plan: Plan
    arch: Arch
    selection: Selection
    groups: tuple[GroupSpec, ...]
    sizes: CacheSizes
    layouts: tuple[Candidate, ...] = ()
    device_bytes: int | None = None
    lacking: RefusedError | None = None

    @property
    def chosen(self) -> Candidate:
        """The layout of the plan, as it was judged."""
        (found,) = [each for each in self.layouts if each.layout == self.plan.layouts[0]]
        return found

    def refusal(self) -> RefusedError | None:
        """Why this plan cannot be started by this release; None when it can."""
        return self.lacking or unbuilt(self.plan.layouts[0], self.layouts)


class _Resolver:
    """One resolution in progress; each method decides one thing and writes it down."""

    def __init__(
        self, intent: Intent, model: ModelFacts, facts: Facts, refused: int | None = None
    ) -> None:
        """`refused`: tokens of a chunk by the cost model with which nothing could be had."""
        self.intent, self.refused = intent, refused
        self.model = model
        self.arch = model.arch.with_options(intent.model_options)
        self.facts = facts
        self.ledger = DecisionLedger()
        self.wishes = Wishes(intent, self.arch, facts, self.ledger)

    def limits(self, dtype: str) -> Limits:
        """With chunks as long as computing wants them, or as the seed says where those were
        refused."""
        chunk = chunks.enough(self.census(), self.facts, dtype, self.intent.goal)
        return self.wishes.limits(chunk, self.refused)

    def chunk_wished(self) -> int | None:
        """Tokens of a chunk longer than the seed's, if the cost model wished for them."""
        if "limits.step_tokens" not in self.ledger:
            return None
        found = self.ledger["limits.step_tokens"]
        return int(str(found.value)) if found.origin is Origin.COST_MODEL else None

    def hopeless(self, found: Sequence[Candidate]) -> dict[LayoutPlan, Candidate]:
        """Layouts that lack more than all activations of a chunk: no shorter one gives them room.
        Messages and copies, which shrink beside, are less than what activations keep."""
        seeds, intent = self.wishes.seeds, self.intent
        rows, running = self.chunk_wished() or 0, intent.concurrency or seeds.running
        width = DTYPE_BYTES[intent.dtype or seeds.dtype]
        return {
            each.layout: each
            for each in found
            if each.error is not None
            and not each.cannot
            and lacking(each.reasons)
            > self._rank(each.layout).activation_bytes(rows, running, width)
        }

    def could_be_one(self, found: Resolved) -> bool:
        """Whether several cards are taken unasked where shorter chunks might leave room on one."""
        alone = found.layouts[0]
        several = found.plan.layouts[0].ranks > 1 and self.intent.parallel is None
        lacks = alone.layout.ranks == 1 and alone.error is not None and not alone.cannot
        return several and lacks and not self.hopeless([alone])

    def record_cache(self, held: Held, selection: Selection) -> None:
        limited = f"limited by {held.cache.limited_by}"
        if self.intent.memory_share is not None:
            limited += f"; at most {self.intent.memory_share:.0%} of the memory is used"
        self.ledger.record("kv_tokens", held.kv_tokens, Origin.DERIVED, limited)
        record_needs(self.ledger, held, selection)

    def draft(self, limits: Limits) -> DraftPlan:
        """The drafter; one that comes with the checkpoint is loaded beside the model."""
        plan = drafts.decide(
            self.intent.draft,
            self.model.draft,
            self.ledger,
            self.intent.origin("draft"),
            step_tokens=limits.step_tokens,
            max_context=limits.max_context,
        )
        if plan.method == drafts.MODEL:
            self.arch = self.arch.with_draft()
        return plan

    def requests(
        self,
        dtype: str,
        limits: Limits,
        page_tokens: int,
        draft: DraftPlan,
        counted: Census,
        layout: LayoutPlan = WHOLE,
    ) -> tuple[OpRequest, ...]:
        """What one rank's kernels are asked for, in its own shapes (B-04); of a pair, its parts."""
        schemes = counted.schemes()
        typical = shares.typical(limits, self.intent.goal, draft.depth, layout.prefill)
        return tuple(
            replace(asked, count=asked.count * parts_held(self.arch, asked.site, half))
            for phase in phases(draft)
            for half in (layout if phase is Phase.CHUNK else of_decodes(layout),)
            for asked in self._rank(half).op_requests(
                phase, *typical[phase], dtype, schemes, page_tokens
            )
        )

    def _rank(self, layout: LayoutPlan) -> Arch:
        return self.arch if layout.tensor == layout.expert == 1 else self.arch.on_rank(layout)

    def census(self) -> Census:
        """The model's tensors, counted; after `draft`, which may bring some along."""
        return census(self.arch, self.model.scheme_of)

    def graphs(self, cards: Cards, held: Held, selection: Selection) -> graphs.GraphChoice:
        chosen = graphs.choose(selection, held.wanted, self.facts.device.kind, cards.draft)
        origin = Origin.SEED if chosen.buckets else Origin.DERIVED
        if not self.intent.graphs:
            chosen, origin = graphs.GraphChoice((), "asked for"), self.intent.origin("graphs")
        self.ledger.record(
            "graph_buckets", chosen.buckets or "none", origin, chosen.why, chosen.losers
        )
        listed = [f"{g.phase} {g.tokens}/{g.runs}" for g in chosen.graphs]
        why = "tokens and runs of each captured step, the largest first"
        self.ledger.record("graphs", ", ".join(listed) or "none", origin, why)
        return chosen

    def record_given(self, machine: str, source: Origin) -> None:
        """What was asked for, and what the machine is. `source`: where its facts come from."""
        intent, facts = self.intent, self.facts
        probed = source is Origin.PROBE
        self.ledger.record(
            "prefix_cache", intent.prefix_cache, intent.origin("prefix_cache"), "reuse of prefixes"
        )
        self.ledger.record("model", self.model.reference, intent.origin("model"), "asked for")
        given = intent.origin("platform") if probed else source
        self.ledger.record("platform", facts.platform, given, "see doctor")
        self.ledger.record("device", facts.device.name, source, "the platform's device")
        what = "fingerprint of devices and software" if probed else "the machine file"
        self.ledger.record("machine", machine, source, what)
        adapters.record(self.ledger, self.arch.adapters, intent.origin("adapters"))
        self.wishes.record_threads(source)

    def plan(self, cards: Cards, taken: Candidate, machine: str) -> Plan:
        """Everything decided, frozen. `taken`: the layout, as it was judged."""
        held, selection = taken.held, taken.selection
        assert held is not None and selection is not None
        layout, limits, draft = held.layout, cards.limits, cards.draft
        captured = self.graphs(cards, held, selection)
        intent, software = self.intent, self.facts.software
        grammar = grammars.decide(intent.grammar, software, self.ledger, intent.origin("grammar"))
        threads = self.ledger["threads"].value
        halves = lanes.halves(layout, cards, self.ledger, taken.cost)
        assert isinstance(threads, int)
        return Plan(
            model=ModelPlan(
                reference=self.model.reference,
                family=self.arch.family,
                dtype=cards.dtype,
                parameters=self.model.parameters,
                vocab_size=self.arch.vocab_size,
                layers=self.arch.layers,
                options=self.intent.model_options,
            ),
            platform=self.facts.platform,
            device=self.facts.device.name,
            machine=machine,
            threads=threads,
            layouts=(layout,),
            phase_layout={phase.value: layout.phase_name(phase) for phase in phases(draft)},
            kv_domains=1 if cards.emulated is not None else layout.data,
            kv_groups=tuple(_group_plan(group, held.cache.sizes) for group in held.groups),
            kv_tokens=held.kv_tokens,
            prefix_cache=self.intent.prefix_cache,
            grammar=grammar,
            bundle=dict(selection.bundle.layouts),
            ops={
                f"{c.request.site}@{c.request.phase.value}": OpPlan(
                    impl=c.impl.id,
                    quality=c.quality.value,
                    evidence=c.evidence.value,
                    setting={} if c.tuned is None else c.tuned.values,
                    tuned="" if c.tuned is None else c.tuned.text,
                )
                for c in selection.bundle.choices
            },
            graph_buckets=captured.buckets,
            graphs=captured.graphs,
            overlap=overlap.decide(captured.graphs, cards, self.ledger),
            halves=halves,
            sum_pieces=lanes.sum_pieces(layout, cards, halves, self.ledger),
            gathers_beside=lanes.gathers_beside(layout, cards, self.ledger),
            shared_beside=lanes.shared_beside(layout, cards, self.ledger),
            rounded_from=dispatch.rounded_from(layout, intent, selection, self.ledger),
            prefill_from=pairs.prefill_from(layout, captured.graphs, cards, self.ledger),
            limits=limits,
            draft=draft,
            ledger=held.ledger() if captured.graphs else graphs.released(held.ledger()),
            decisions=self.decisions(),
            adapters=adapters.adapter_plans(self.arch.adapters),
            emulated=cards.emulated.values() if cards.emulated is not None else {},
        )

    def decisions(self) -> tuple[Decision, ...]:
        """The ledger, with where the user's values came from."""
        said: dict[str, list[str]] = {}
        for name, words in self.intent.said.items():
            said.setdefault(DECISIONS[name], []).append(words)
        found = []
        for decision in self.ledger.freeze():
            key = decision.key
            if key.startswith("ops.") and decision.origin is self.intent.origin("ops"):
                key = "ops"
            why = "; ".join((decision.why, *said.get(key, ())))
            found.append(replace(decision, why=why))
        return tuple(found)


def resolve(
    intent: Intent,
    model: ModelFacts,
    facts: Facts,
    registry: Registry,
    policy: Policy,
    machine: str = "",
    source: Origin = Origin.PROBE,
    measured: Callable[[str], Calibration | None] = nothing_measured,
    needs: Callable[[str], Needs | None] = nothing_known,
    emulation: Emulation | None = None,
) -> Resolved:
    """Decide everything; once more with the seed's chunks where longer ones leave too little memory
    for any layout, or for a single card that these would leave enough (ADR 0057).

    Args:
        machine: fingerprint id, or name, of the machine that `facts` describe.
        source: where the facts come from: read off this machine, or a machine file.
        measured: step times of this machine by `calibration.key`, None where there are none.
        needs: what steps were measured to need here, by `needs.needs_key`; None likewise.
        emulation: the ranks whose first is run here alone.

    Raises:
        UsageError: a malformed wish.
        RefusedError: it cannot be done here; every reason is listed.
    """
    _check_wish(intent)
    facts = seen_by_ranks(intent, facts, model.arch.routed_experts, emulation)

    def made(resolver: _Resolver, judged: Mapping[LayoutPlan, Candidate]) -> Resolved:
        return _resolved(
            resolver, registry, policy, machine, source, measured, needs, emulation, judged
        )

    longer = _Resolver(intent, model, facts)

    def again(candidates: Sequence[Candidate]) -> Resolved:
        shorter = _Resolver(intent, model, facts, longer.chunk_wished())
        return made(shorter, longer.hopeless(candidates))

    try:
        found = made(longer, {})
    except NoLayout as refusal:
        if refusal.code != DOES_NOT_FIT or longer.chunk_wished() is None:
            raise
        try:
            return again(refusal.candidates)
        except UsageError:  # of the shorter step: nobody wished for it
            raise refusal from None
    if longer.chunk_wished() is None or not longer.could_be_one(found):
        return found
    try:
        one = again(found.layouts)
    except (RefusedError, UsageError):
        return found
    return one if one.plan.layouts[0].ranks == 1 else found


def _resolved(
    resolver: _Resolver,
    registry: Registry,
    policy: Policy,
    machine: str,
    source: Origin,
    measured: Callable[[str], Calibration | None],
    needs: Callable[[str], Needs | None],
    emulation: Emulation | None,
    judged: Mapping[LayoutPlan, Candidate],
) -> Resolved:
    """`resolve` for chunks of one length. `judged`: as `search` has it."""
    intent, model, facts = resolver.intent, resolver.model, resolver.facts
    ledger, wishes = resolver.ledger, resolver.wishes
    dtype = wishes.dtype()
    limits = resolver.limits(dtype)
    page, draft = wishes.page_tokens(), resolver.draft(limits)
    counted = resolver.census()

    known: Outcomes = {}

    @cache
    def shapes(layout: LayoutPlan) -> Selection:
        asked = resolver.requests(dtype, limits, page, draft, counted, layout)
        return select(registry, asked, facts, policy, shares.steps(limits, intent.goal), known)

    cards = Cards(
        intent=intent,
        arch=resolver.arch,
        counted=counted,
        facts=facts,
        dtype=dtype,
        limits=limits,
        page_tokens=page,
        draft=draft,
        threads=intent.threads or facts.host.usable_cores or 1,
        measured=measured,
        needs=needs,
        emulated=emulation,
    )
    found = search(
        cards,
        lambda layout: shapes(alike(layout)),
        registry.layout,
        ledger,
        intent.origin("parallel"),
        judged,
    )
    held, selection = found.chosen.held, found.chosen.selection
    assert held is not None and selection is not None
    record_selection(ledger, intent, selection)
    cards.limits = replace(limits, max_running=min(held.running, limits.max_running))
    wishes.record_running(cards.limits.max_running)
    resolver.record_cache(held, selection)
    resolver.record_given(machine, source)
    plan = resolver.plan(cards, found.chosen, machine)
    plan.check_origins()
    return Resolved(
        plan=plan,
        arch=resolver.arch,
        selection=selection,
        groups=held.groups,
        sizes=held.cache.sizes,
        layouts=found.candidates,
        device_bytes=facts.device.memory_bytes,
        lacking=model.refusal(),
    )


def _check_wish(intent: Intent) -> None:
    if intent.goal not in GOALS:
        raise UsageError(f"goal {intent.goal!r} is not known.", f"Goals: {', '.join(GOALS)}.")
    if intent.memory_share is not None and not 0 < intent.memory_share <= 1:
        raise UsageError(
            f"--memory-share is {intent.memory_share:g}.", "Pass a part of the whole, like 0.9."
        )


def choose(
    intent: Intent, model: ModelFacts, facts: Facts, registry: Registry, policy: Policy
) -> Selection:
    """The kernels alone, for a machine that cannot hold the rest. Raises as `resolve`."""
    resolver = _Resolver(intent, model, facts)
    wishes = resolver.wishes
    dtype = wishes.dtype()
    limits, page = resolver.limits(dtype), wishes.page_tokens()
    draft = resolver.draft(limits)
    asked = resolver.requests(dtype, limits, page, draft, resolver.census())
    return select(registry, asked, facts, policy, shares.steps(limits, intent.goal))


def phases(draft: DraftPlan) -> tuple[Phase, ...]:
    """The phases that an engine meets; kernels are chosen for each."""
    if not draft.depth:
        return PHASES
    return (*PHASES, Phase.VERIFY, *((Phase.DRAFT,) if draft.method == drafts.MODEL else ()))


def _group_plan(group: GroupSpec, sizes: CacheSizes) -> GroupPlan:
    return GroupPlan(
        name=group.name,
        kind=group.kind.value,
        layout=group.form.layout,
        pages=sizes.pages[group.index],
        page_tokens=group.page_tokens,
        page_bytes=group.page_bytes,
        slots=sizes.slots + 1 if group.slot_bytes else 0,
        slot_bytes=group.slot_bytes,
        snapshots=sizes.places(group.index),
        snapshot_bytes=group.snapshot_bytes if group.slot_bytes else 0,
    )
