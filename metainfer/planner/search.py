"""Which layout: every one judged, the best for the goal named, and why the others lost.

Several ranks run where their layout is asked for: processes of the host on a CPU, else a card each.
Unasked, one of several cards is run: while it holds the model it is what serves, whatever a layout
over several would give; that one is named beside it. Where one card does not, the best layout for
the goal is planned, and starting it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.kernels.choice import Bundle, Selection
from metainfer.kernels.impl import Layout
from metainfer.planner import goals
from metainfer.planner.budget import UNKNOWN_MEMORY
from metainfer.planner.calibration import key, nothing_measured
from metainfer.planner.candidate import Candidate
from metainfer.planner.cards import Cards
from metainfer.planner.dispatch import least_rows
from metainfer.planner.emulation import emulates, record_emulation
from metainfer.planner.fitting import DOES_NOT_FIT, first_that_fits
from metainfer.planner.graphs import replayed
from metainfer.planner.held import Held
from metainfer.planner.lanes import priced_halves
from metainfer.planner.layouts import (
    MOST_PROCESSES,
    NOT_BUILT,
    enumerate_layouts,
    named,
    of_prompts,
    processes,
    runs,
)
from metainfer.planner.limits import CacheTooSmall, longest_context
from metainfer.planner.over_cards import record_collectives
from metainfer.planner.phases import record_phases
from metainfer.planner.predict import predict, record_speed
from metainfer.planner.steps import step_cost
from metainfer.platform.facts import CPU, Facts

_ROOM = (DOES_NOT_FIT, UNKNOWN_MEMORY)
_ONLY_WAY = "no single card holds the model with these limits"


@dataclass(frozen=True, slots=True)
class Found:
    """The layout that the plan takes, the one the goal would take, and all of them in order."""

    chosen: Candidate
    best: Candidate
    candidates: tuple[Candidate, ...]


class NoLayout(RefusedError):
    """None can be, or not the one that was asked for. `candidates`: all, as they were judged."""

    def __init__(self, told: RefusedError, candidates: Sequence[Candidate]) -> None:
        super().__init__(told.cause, told.remedy, reasons=told.reasons, code=told.code)
        self.candidates = tuple(candidates)


def search(
    cards: Cards,
    selection_of: Callable[[LayoutPlan], Selection],
    packing_of: Callable[[str], Layout],
    ledger: DecisionLedger,
    origin: Origin,
    judged: Mapping[LayoutPlan, Candidate],
) -> Found:
    """Judge every layout of the machine and write the decision down.

    Args:
        selection_of: feasible bundles for one rank's shapes under a layout, fastest first.
        packing_of: layout id -> packing.
        origin: who asked for a layout, where one was asked for.
        judged: layouts of which is known what they lack, whatever the limits now are.

    Raises:
        NoLayout: none can be, or not the one that was asked for; every reason.
        UsageError: it does not exist on this machine.
    """
    asked, experts = cards.intent.parallel, cards.arch.routed_experts
    devices = len(cards.facts.devices)
    if cards.emulated is not None:
        devices = cards.emulated.ranks
    elif cards.facts.device.kind == CPU:
        devices = processes(asked, experts)
    layouts = enumerate_layouts(devices, experts)
    if cards.emulated is not None:
        layouts = tuple(each for each in layouts if emulates(each, devices))
    wanted = None if asked is None else named(asked, layouts)
    if asked is not None and wanted is None:
        raise _unknown(asked, devices, cards)
    found = tuple(
        judged.get(layout) or _judge(cards, layout, selection_of, packing_of) for layout in layouts
    )
    feasible = [each for each in found if each.feasible]
    if wanted is not None:
        chosen = next(each for each in found if each.layout == wanted)
        if not chosen.feasible:
            raise NoLayout(_refusal([chosen], cards), found)
    elif not feasible:
        raise NoLayout(_refusal(found, cards), found)
    else:
        single = found[0]
        alone = single.feasible and single.layout.ranks == 1
        chosen = single if alone else goals.best_for(feasible, cards.intent.goal)
        if not alone:  # nobody has to ask for what is the only way
            needed = replace(chosen, planned_only=_planned_only(cards, chosen.layout, asked=True))
            found = tuple(needed if each is chosen else each for each in found)
            feasible = [each for each in found if each.feasible]
            chosen = needed
    best = goals.best_for(feasible, cards.intent.goal)
    _record(ledger, Found(chosen, best, found), cards, origin)
    return Found(chosen, best, found)


def _unknown(asked: str, devices: int, cards: Cards) -> UsageError:
    """No layout has that name here; says which names there are."""
    on_cpu, experts = cards.facts.device.kind == CPU, cards.arch.routed_experts
    if cards.emulated is not None:
        every = enumerate_layouts(devices, experts)
        names, there = [e.name for e in every if emulates(e, devices)], named(asked, every)
        apart = there is not None and there.ranks == devices
        lone = "deals rows or pages to peers that would not be there"
        raise UsageError(
            f"layout {asked!r} {lone if apart else f'is none of {devices} ranks'}.",
            f"There is: {', '.join(names)}.",
            code="unknown_parallel",
        )
    names = [each.name for each in enumerate_layouts(2 if on_cpu else devices, experts)]
    more = f", and so on up to {MOST_PROCESSES} processes of this host" if on_cpu else ""
    where = "a CPU" if on_cpu else f"{devices} devices"
    return UsageError(
        f"layout {asked!r} does not exist for this model on {where}.",
        f"There is: {', '.join(names)}{more}.",
        code="unknown_parallel",
    )


def unbuilt(layout: LayoutPlan, candidates: Sequence[Candidate]) -> RefusedError | None:
    """What `serve` and `generate` refuse before anything is loaded: a plan of several ranks on
    devices of a kind that runs one.

    Says what keeps the model from one device, and how it would fit there.
    """
    planned = next((each for each in candidates if each.layout == layout), None)
    if planned is None or planned.built:
        return None
    alone = candidates[0]
    remedy = "Look at it with plan; serve a model that one device holds."
    if isinstance(alone.error, CacheTooSmall) and not alone.cannot:
        remedy = alone.error.advised().remedy
    return RefusedError(
        f"the plan takes layout {layout.name} on {layout.ranks} devices; "
        f"{'; '.join(reason.message for reason in planned.planned_only)}.",
        remedy,
        reasons=(*alone.reasons, *planned.planned_only),
        code="not_built",
    )


def _judge(
    cards: Cards,
    layout: LayoutPlan,
    selection_of: Callable[[LayoutPlan], Selection],
    packing_of: Callable[[str], Layout],
) -> Candidate:
    """All blockers of a layout in one pass: what cannot be cut, what memory lacks, for which of a
    rank's shapes there is no kernel."""
    cannot = _objections(cards, layout)
    if cannot:  # there are no shapes of a rank
        selection = selection_of(enumerate_layouts(1, 0)[0])
    else:
        try:
            selection = selection_of(layout)
        except RefusedError as error:
            if layout.ranks == 1:
                raise
            return Candidate(layout=layout, cannot=error.reasons)
    planned_only = _planned_only(cards, layout)

    def packings(names: Mapping[str, str]) -> dict[str, Layout]:
        return {role: packing_of(name) for role, name in names.items()}

    if layout.shards > 1:
        cannot = (*cannot, *cards.against_dealing(layout, packings(selection.bundle.layouts)))

    small: list[tuple[Bundle, CacheTooSmall]] = []  # weights fit, the cache does not

    def attempt(bundle: Bundle, running: int | None = None) -> Held:
        try:
            return cards.hold(layout, packings(bundle.layouts), running, bundle.choices)
        except CacheTooSmall as refusal:
            if running is None:
                small.append((bundle, refusal))
            raise

    try:
        try:
            chosen, held = first_that_fits(selection, attempt)
        except RefusedError as error:
            # A concurrency that nobody asked for is a seed: it gives way before a refusal.
            seed = cards.intent.concurrency is None
            held_by = [
                cards.most_running(layout, packings(b.layouts), b.choices) for b, _ in small if seed
            ]
            fewer = max(held_by, default=0)
            if not fewer:  # limits can be lowered where weights fit
                refusals = [refusal for _, refusal in small]
                raise min(refusals, key=lambda e: lacking(e.reasons), default=error) from None
            chosen, held = first_that_fits(selection, lambda bundle: attempt(bundle, fewer))
    except RefusedError as error:
        if error.code not in _ROOM:
            raise
        return Candidate(
            layout=layout,
            cannot=cannot,
            planned_only=planned_only,
            error=error,
            longest=_reach(error),
        )
    if cannot:
        return Candidate(layout=layout, cannot=cannot, planned_only=planned_only)
    return _priced(cards, layout, chosen, held, planned_only)


def _planned_only(cards: Cards, layout: LayoutPlan, *, asked: bool = False) -> tuple[Reason, ...]:
    """Why this release plans a layout and does not run it. `asked`: as if it were."""
    wish = cards.intent.parallel
    asked = asked or (wish is not None and named(wish, (layout,)) is layout)
    # A rank that is emulated runs where any single one does.
    kind = CPU if cards.emulated is not None else cards.facts.device.kind
    return runs(layout, kind, asked=asked).reasons


def _priced(
    cards: Cards,
    layout: LayoutPlan,
    chosen: Selection,
    held: Held,
    planned_only: tuple[Reason, ...],
) -> Candidate:
    """A layout that fits, with what its steps cost."""
    step, limit = cards.limits.step_tokens, cards.arch.max_context
    facts = _of_a_rank(cards.facts, cards.here(layout))
    tree = cards.emulated.tree if cards.emulated is not None else None
    cost = step_cost(
        cards.counted,
        held,
        facts,
        cards.dtype,
        tree,
        replayed=replayed(held.wanted, chosen.bundle.choices),
        halves=priced_halves(layout, cards),
        rounded_from=least_rows(cards.intent, chosen, Phase.CHUNK),
    )
    calibration = None
    if layout.ranks == 1 and cards.measured is not nothing_measured:
        calibration = cards.measured(key(cards.arch, cards.dtype, chosen.bundle, cards.threads))
    return Candidate(
        layout=layout,
        planned_only=planned_only,
        selection=chosen,
        held=held,
        prediction=predict(
            cards.counted,
            held,
            facts,
            cards.dtype,
            running=min(held.running, cards.limits.max_running),
            step_tokens=step,
            cost=cost,
            calibration=calibration,
        ),
        cost=cost,
        calibration=calibration,
        longest=held.longest(step, limit),
        pairs=held.pairs(step, limit),
    )


def _objections(cards: Cards, layout: LayoutPlan) -> tuple[Reason, ...]:
    """What forbids a layout, or either half of a pair, whatever the memory."""
    blocks = cards.counted.blocks()
    found = {
        reason.message: reason
        for each in dict.fromkeys((layout, of_prompts(layout)))
        for reason in cards.arch.layout_objections(each, blocks).reasons
    }
    return tuple(found.values())


def _of_a_rank(facts: Facts, ranks: int) -> Facts:
    """What one of `ranks` can count on: processes of a host share its cores and its memory."""
    device = facts.device
    if device.kind != CPU or ranks == 1:
        return facts
    read = None if device.read_bytes_s is None else device.read_bytes_s / ranks
    dots = {dtype: rate / ranks for dtype, rate in device.dot_flops.items()}
    return replace(facts, devices=(replace(device, read_bytes_s=read, dot_flops=dots),))


def _reach(error: RefusedError) -> int | None:
    """Tokens that would fit beside the weights, where only the cache is too small."""
    if not isinstance(error, CacheTooSmall):
        return None
    ask = error.ask
    return longest_context(ask.groups, ask.budget_bytes, ask.step_tokens, ask.context)


def _refusal(found: Sequence[Candidate], cards: Cards) -> RefusedError:
    """Every layout's reasons; the cause and the remedy of the one that lacks the least."""
    tried = [each for each in found if each.error is not None and not each.cannot]
    if not tried:
        (only, *_) = found
        return RefusedError(
            f"layout {only.layout.name} cannot be.",
            "Choose another one.",
            reasons=only.reasons,
            code="layout_refused",
        )
    nearest = min(tried, key=_lacking)
    error = nearest.error
    assert error is not None
    if isinstance(error, CacheTooSmall):
        error = error.advised()
    if len(found) == 1 or error.code == UNKNOWN_MEMORY:
        return error
    name = nearest.layout.name
    reasons = tuple(
        Reason(
            reason.code,
            f"{each.layout.name}: {reason.message}",
            {"layout": each.layout.name, **reason.data},
        )
        for each in found
        for reason in each.reasons
    )
    devices = len(cards.facts.devices)
    return RefusedError(
        f"no layout on {devices} {cards.facts.device.name} holds it; {name} lacks the least: "
        f"{error.cause}",
        error.remedy,
        reasons=reasons,
        code=error.code,
    )


def _lacking(candidate: Candidate) -> tuple[bool, int]:
    """Weights that do not fit lack more than a cache that does not; then bytes."""
    return not isinstance(candidate.error, CacheTooSmall), lacking(candidate.reasons)


def lacking(reasons: Sequence[Reason]) -> int:
    """Bytes that are lacking."""
    short = 0
    for reason in reasons:
        need, have = reason.data.get("need"), reason.data.get("have")
        if isinstance(need, int) and isinstance(have, int):
            short += need - have
    return short


def _record(ledger: DecisionLedger, found: Found, cards: Cards, origin: Origin) -> None:
    chosen, best, goal = found.chosen, found.best, cards.intent.goal
    devices, name = len(cards.facts.devices), found.chosen.layout.name
    feasible = [each for each in found.candidates if each.feasible]
    why = "one device: every phase runs on it"
    decided = Origin.DERIVED
    if cards.intent.parallel is not None:
        why, decided = "asked for", origin
    elif cards.emulated is not None:
        why, decided = goals.why(goal, best, feasible), goals.by(best)
    elif chosen.layout.ranks > 1:
        only = "; ".join(reason.message for reason in chosen.planned_only)
        rest = _ONLY_WAY if chosen.built else f"planned only: {only}"
        why, decided = f"{goals.why(goal, best, feasible)}; {rest}", goals.by(best)
    elif devices > 1:
        why = f"1 of {devices} devices is used: {NOT_BUILT}"
    losers = tuple(
        Loser(each.layout.name, goals.lost(each, chosen, goal, feasible))
        for each in found.candidates
        if each is not chosen
    )
    ledger.record("layouts", name, decided, why, losers)
    record_speed(ledger, chosen.prediction)
    apart = chosen.layout.prefill > 1
    said = "chunks as the first part says, all else as the second" if apart else ""
    ledger.record("phase_layout", name, Origin.DERIVED, said or "the same for every phase")
    domains, whose = chosen.layout.data, f"attention domains of {name}"
    if cards.emulated is not None:
        domains, whose = 1, f"that of one rank; {name} has {domains}"
        record_emulation(ledger, cards.emulated, cards.intent.origin("rank_of"))
    ledger.record("kv_domains", domains, Origin.DERIVED, whose)
    if cards.emulated is None and chosen.built:
        record_collectives(ledger, cards.intent, cards.facts.device.kind, chosen.layout)
    if devices > 1:
        others = tuple(
            Loser(each.layout.name, goals.lost(each, best, goal, feasible))
            for each in feasible
            if each is not best
        )
        said = goals.why(goal, best, feasible)
        ledger.record("goal_layout", best.layout.name, goals.by(best), said, others)
        record_phases(ledger, feasible)
