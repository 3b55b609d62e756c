"""Selection in two stages: a feasible bundle first, then each op inside it.

A *bundle* fixes what several ops share: the packing of weights, the layout of cache pages. A
machine cannot hold two packings of the same weights, so the ops cannot choose alone. For every
candidate bundle each (site, phase) of the model is resolved; a bundle with an unserved site is
refused with the reasons of every implementation at that site.

Pure: facts + requests + records in, choices with all losers out. No device, no weights, no torch.
Runs once, at start; the hot path looks a name up in the table made from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason, Verdict, all_of, reject, require
from metainfer.kernels.bundles import candidate_layouts, check_pins, pin_of, roles_of
from metainfer.kernels.impl import Context, Evidence, Impl, Numerics, OpRequest, Quality
from metainfer.kernels.refusal import refusal, unserved_reasons
from metainfer.kernels.registry import Registry
from metainfer.kernels.tuning import Tuned, nothing_tuned
from metainfer.platform.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What may be chosen.

    `pins`: op or site, ``op@phase`` for one phase -> implementation name, from the user; a pin that
    cannot run is an error.
    `evidence`: implementation id -> what is known about it on this machine. `allow_fallback`: ops
    for which a `REFERENCE` implementation may be chosen by ``auto``; ``all`` allows every one.
    `min_evidence`: the weakest evidence that ``auto`` accepts. `disproven`: id -> how its cases
    failed on this machine; not even a pin takes it. `allow_lossy`: ids opted in.
    `measured`: (implementation id, phase) -> seconds from a record of this machine. `tuned`: how
    an implementation is launched for a request, from records, and its seconds where it was measured
    for the very shape.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    layout_pins: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    allow_fallback: frozenset[str] = frozenset()
    min_evidence: Evidence = Evidence.OTHER_CARD
    disproven: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    allow_lossy: frozenset[str] = frozenset()
    measured: Mapping[tuple[str, str], float] = field(default_factory=dict)
    tuned: Callable[[Impl, OpRequest], Tuned | None] = nothing_tuned


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation that lost, and every reason why."""

    impl: str
    reasons: tuple[Reason, ...]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner at one (site, phase). `slowdown`: its cost over that of the cheapest known
    implementation, rejected ones included; None where either cost is unknown or that one costs
    nothing. `tuned`: how it is launched, where a record says."""

    request: OpRequest
    impl: Impl
    quality: Quality
    evidence: Evidence
    why: str
    rejected: tuple[Candidate, ...]
    seconds: float | None = None
    slowdown: float | None = None
    tuned: Tuned | None = None


@dataclass(frozen=True, slots=True)
class Unserved:
    """A (site, phase) with no implementation, and all reasons of all candidates.

    `pin`: the implementation that was asked for there; it is then the only candidate.
    """

    request: OpRequest
    rejected: tuple[Candidate, ...]
    pin: str = ""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A feasible set of shared layouts with the choice at every site and phase. `seconds`: of a
    token of an answer."""

    layouts: Mapping[str, str]
    choices: tuple[Choice, ...]
    seconds: float | None = None

    @property
    def name(self) -> str:
        return bundle_name(self.layouts)


@dataclass(frozen=True, slots=True)
class RefusedBundle:
    """A candidate bundle that lost, with reasons (unserved sites, or a higher cost)."""

    layouts: Mapping[str, str]
    reasons: tuple[Reason, ...]
    unserved: tuple[Unserved, ...] = ()

    @property
    def name(self) -> str:
        return bundle_name(self.layouts)


@dataclass(frozen=True, slots=True)
class Selection:
    """The winning bundle and the losers; `others`: the feasible ones among them, fastest first."""

    bundle: Bundle
    refused: tuple[RefusedBundle, ...]
    others: tuple[Bundle, ...] = ()


Outcomes = dict[tuple[tuple[Hashable, ...], tuple[str | None, ...]], Choice | Unserved]
"""By request, and by those layouts that its op's candidates need."""


def bundle_name(layouts: Mapping[str, str]) -> str:
    return " + ".join(layouts[role] for role in sorted(layouts)) or "none"


def select_op(
    registry: Registry,
    request: OpRequest,
    facts: Facts,
    layouts: Mapping[str, str],
    policy: Policy,
) -> Choice | Unserved:
    """Choose one implementation for one (site, phase) inside a bundle's layouts.

    Order: the user's pin, then measured seconds, then predicted seconds, then priority.
    Every loser carries all of its reasons.

    Raises:
        UsageError: a pin names an implementation that does not exist.
        RefusedError: a pinned implementation cannot run; carries every reason.
    """
    context = Context(request, facts, layouts)
    impls = registry.of(request.op)
    verdicts = {impl.name: objections(impl, context) & _disproof(impl, policy) for impl in impls}
    costs = {impl.name: _seconds(impl, context, policy) for impl in impls}
    pin = pin_of(policy.pins, request)
    if pin is not None:
        return _pinned(pin, context, impls, verdicts, costs, policy)

    for impl in impls:
        verdicts[impl.name] = verdicts[impl.name] & _permission(impl, context, policy)
    eligible = [impl for impl in impls if verdicts[impl.name].accepted]
    if not eligible:
        return Unserved(
            request,
            tuple(Candidate(i.name, verdicts[i.name].reasons, costs[i.name]) for i in impls),
        )
    order = {impl.name: index for index, impl in enumerate(impls)}
    winner = min(
        eligible,
        key=lambda impl: (
            _quality(impl, context) is Quality.REFERENCE,
            _cost_key(costs[impl.name]),
            -impl.priority,
            order[impl.name],
        ),
    )
    why = _why(winner, eligible, costs, policy, context)
    losers = tuple(
        _loser(impl, winner, verdicts[impl.name], costs) for impl in impls if impl is not winner
    )
    return _choice(winner, context, policy, why, losers, costs)


def select(
    registry: Registry,
    requests: Sequence[OpRequest],
    facts: Facts,
    policy: Policy,
    steps: Mapping[Phase, float] | None = None,
    known: Outcomes | None = None,
) -> Selection:
    """Choose the bundle, and inside it an implementation for every request.

    The bundle with the smallest predicted time wins, each phase weighed by `steps`: how many of its
    steps a token of an answer takes (None: one of each). Bundles without a full cost estimate rank
    behind those with one, by declared order. `known`: outcomes of earlier calls with the same
    registry, facts and policy, and from now on of this one: layouts share most of their requests.

    Raises:
        RefusedError: no bundle serves the model, or none with a pin; every distinct reason of
            every bundle.
        UsageError: a pin names something that does not exist.
    """
    check_pins(registry, requests, policy)
    feasible: list[Bundle] = []
    refused: list[RefusedBundle] = []
    found: Outcomes = {} if known is None else known
    keys = [request.key for request in requests]
    roles = {request.op: roles_of(registry, request.op) for request in requests}

    def outcome(number: int, request: OpRequest, layouts: Mapping[str, str]) -> Choice | Unserved:
        """Looked at once for each combination of those layouts that the op's candidates need."""
        key = (keys[number], tuple(layouts.get(role) for role in roles[request.op]))
        if key not in found:
            own = {role: layouts[role] for role in roles[request.op] if role in layouts}
            found[key] = _outcome(registry, request, facts, own, policy)
        return found[key]

    @cache
    def against(role: str, layout: str) -> Verdict:
        return _layout_objections(registry, role, layout, requests, facts, policy)

    for layouts in candidate_layouts(registry, requests):
        verdict = all_of(against(role, layouts[role]) for role in sorted(layouts))
        if not verdict.accepted:
            refused.append(RefusedBundle(layouts, verdict.reasons))
            continue
        outcomes = [outcome(number, r, layouts) for number, r in enumerate(requests)]
        unserved = tuple(o for o in outcomes if isinstance(o, Unserved))
        if unserved:
            refused.append(RefusedBundle(layouts, unserved_reasons(unserved), unserved))
            continue
        choices = tuple(o for o in outcomes if isinstance(o, Choice))
        feasible.append(Bundle(layouts, choices, _total(choices, steps)))
    if not feasible:
        raise refusal(refused, facts.device.name)
    feasible.sort(key=lambda bundle: (_reference_sites(bundle), _cost_key(bundle.seconds)))
    winner = feasible[0]
    refused += [RefusedBundle(b.layouts, (_slower(b, winner),)) for b in feasible[1:]]
    return Selection(winner, tuple(refused), tuple(feasible[1:]))


def _outcome(
    registry: Registry,
    request: OpRequest,
    facts: Facts,
    layouts: Mapping[str, str],
    policy: Policy,
) -> Choice | Unserved:
    """`select_op`, with a refused pin as data: the other sites and bundles are still looked at."""
    try:
        return select_op(registry, request, facts, layouts, policy)
    except RefusedError as error:
        pin = pin_of(policy.pins, request) or ""
        return Unserved(request, (Candidate(pin, error.reasons),), pin)


def objections(impl: Impl, context: Context) -> Verdict:
    """Everything that stops this implementation here, in one pass."""
    request = context.request
    checks = [
        require(request.phase in impl.phases, "phase", f"does not serve the {request.phase} phase"),
        require(
            request.dtype in impl.dtypes,
            "dtype",
            f"computes in {', '.join(sorted(impl.dtypes))}, the model runs in {request.dtype}",
        ),
        all_of(_layout_match(impl, role, context.layouts) for role in sorted(impl.requires_layout)),
        all_of(
            reject("semantics", f"does not honour {need}", semantics=need)
            for need in sorted(request.semantics - impl.honours)
        ),
        all_of(condition(context) for condition in impl.conditions),
    ]
    return all_of(checks)


def _layout_match(impl: Impl, role: str, layouts: Mapping[str, str]) -> Verdict:
    wanted, offered = impl.requires_layout[role], layouts.get(role, "nothing")
    return require(
        wanted == offered,
        "layout",
        f"needs {role} in {wanted}, the bundle holds {offered}",
        needed=wanted,
        offered=offered,
    )


def _disproof(impl: Impl, policy: Policy) -> Verdict:
    """Cases that failed on this machine; the reasons are the cases' own."""
    failures = policy.disproven.get(impl.id, ())
    return all_of(reject("disproven", f"failed its cases here: {text}") for text in failures)


def _permission(impl: Impl, context: Context, policy: Policy) -> Verdict:
    """What ``auto`` may take without being asked: enough evidence, no loss, no reference."""
    evidence = policy.evidence.get(impl.id, Evidence.NONE)
    quality = _quality(impl, context)
    op = context.request.op
    allowed = {op, context.request.site, "all"} & policy.allow_fallback
    return all_of(
        (
            require(
                evidence.strength >= policy.min_evidence.strength,
                "evidence",
                f"evidence is '{evidence.value}', auto needs '{policy.min_evidence.value}'",
            ),
            require(
                impl.numerics is not Numerics.LOSSY or impl.id in policy.allow_lossy,
                "lossy",
                "is lossy and was not asked for",
            ),
            require(
                quality is not Quality.REFERENCE or bool(allowed),
                "reference",
                f"is a reference path; --allow-fallback {op} permits it",
            ),
        )
    )


def _quality(impl: Impl, context: Context) -> Quality:
    if impl.provider == "reference":
        return Quality.REFERENCE
    native = bool(impl.native_when) and all_of(c(context) for c in impl.native_when).accepted
    return Quality.NATIVE if native else Quality.COMPATIBLE


def _seconds(impl: Impl, context: Context, policy: Policy) -> float | None:
    measured = policy.measured.get((impl.id, context.request.phase.value))
    if measured is not None:
        return measured
    tuned = policy.tuned(impl, context.request)
    if tuned is not None and tuned.seconds is not None:
        return tuned.seconds
    return impl.cost(context) if impl.cost is not None else None


def _cost_key(seconds: float | None) -> tuple[bool, float]:
    return (seconds is None, seconds or 0.0)


def _choice(
    impl: Impl,
    context: Context,
    policy: Policy,
    why: str,
    losers: tuple[Candidate, ...],
    costs: Mapping[str, float | None],
) -> Choice:
    own = costs[impl.name]
    # Kernels of another kind of device are no measure of what this one could do.
    foreign = {c.impl for c in losers if any(reason.code == "device" for reason in c.reasons)}
    known = [cost for name, cost in costs.items() if cost is not None and name not in foreign]
    return Choice(
        context.request,
        impl,
        _quality(impl, context),
        policy.evidence.get(impl.id, Evidence.NONE),
        why,
        losers,
        own,
        None if own is None else _slowdown(own, min(known)),
        policy.tuned(impl, context.request),
    )


def _slowdown(own: float, best: float) -> float | None:
    if own == best:
        return 1.0
    return round(own / best, 3) if best else None


def _pinned(
    pin: str,
    context: Context,
    impls: Sequence[Impl],
    verdicts: Mapping[str, Verdict],
    costs: Mapping[str, float | None],
    policy: Policy,
) -> Choice:
    request = context.request
    impl = next((impl for impl in impls if impl.name == pin), None)
    if impl is None:
        raise UsageError(
            f"op {request.op} has no implementation named {pin!r}.",
            f"It has: {', '.join(i.name for i in impls)}.",
            code="unknown_implementation",
        )
    if not verdicts[pin].accepted:
        raise RefusedError(
            f"{impl.id} was asked for and cannot run at {request.site} in {request.phase}.",
            "Remove the pin to let auto choose.",
            reasons=verdicts[pin].reasons,
            code="pin_refused",
        )
    losers = tuple(
        Candidate(
            other.name,
            (*verdicts[other.name].reasons, Reason("pin", f"{pin} was asked for")),
            costs[other.name],
        )
        for other in impls
        if other is not impl
    )
    return _choice(impl, context, policy, "asked for", losers, costs)


def _loser(
    impl: Impl, winner: Impl, verdict: Verdict, costs: Mapping[str, float | None]
) -> Candidate:
    reasons = verdict.reasons
    if not reasons:
        mine, best = costs[impl.name], costs[winner.name]
        if mine is not None and best is not None and mine > best:
            text = f"predicted {mine * 1e6:.1f} µs against {best * 1e6:.1f} µs of {winner.name}"
            reasons = (Reason("slower", text, {"seconds": mine, "best": best}),)
        else:
            reasons = (Reason("rank", f"ranks behind {winner.name}"),)
    return Candidate(impl.name, reasons, costs[impl.name])


def _why(
    winner: Impl,
    eligible: Sequence[Impl],
    costs: Mapping[str, float | None],
    policy: Policy,
    context: Context,
) -> str:
    if len(eligible) == 1:
        return "the only one that can run here"
    tuned = policy.tuned(winner, context.request)
    measured = tuned is not None and tuned.seconds is not None
    if measured or (winner.id, context.request.phase.value) in policy.measured:
        return "fastest by this machine's record"
    device = context.facts.device
    if costs[winner.name] is not None:
        part = "" if device.dot_flops else ", by bytes alone: the matrix rate is unknown"
        return f"fastest by the cost model{part}"
    if device.read_bytes_s is None:
        return "first in declared order: the memory rate is unknown, so no cost is"
    return "first in declared order"


def _layout_objections(
    registry: Registry,
    role: str,
    layout_id: str,
    requests: Sequence[OpRequest],
    facts: Facts,
    policy: Policy,
) -> Verdict:
    """What stands against a layout here, whatever stands beside it."""
    layout, pin = registry.layout(layout_id), policy.layout_pins.get(role)
    asked = require(pin is None or pin == layout.id, "pin", f"{role} layout {pin} was asked for")
    seen: dict[tuple[str, str], Reason] = {}
    readers = registry.readers(role)
    for request in requests:
        if not layout.conditions and request.op not in readers:
            continue
        context = Context(request, facts, {role: layout_id})
        outcome = all_of(condition(context) for condition in layout.conditions)
        if layout.schemes is not None and request.op in readers:
            foreign = sorted(set(request.schemes) - layout.schemes)
            outcome &= require(
                not foreign,
                "weight-scheme",
                f"{layout.id} does not pack {', '.join(foreign)}",
            )
        for reason in outcome.reasons:
            seen.setdefault((reason.code, reason.message), reason)
    return asked & Verdict(tuple(seen.values()))


def _total(choices: Sequence[Choice], steps: Mapping[Phase, float] | None) -> float | None:
    seconds = [
        c.seconds * c.request.count * (1.0 if steps is None else steps[c.request.phase])
        for c in choices
        if c.seconds is not None
    ]
    return sum(seconds) if seconds else None


def _reference_sites(bundle: Bundle) -> int:
    return sum(choice.quality is Quality.REFERENCE for choice in bundle.choices)


def _slower(loser: Bundle, winner: Bundle) -> Reason:
    if loser.seconds is None or winner.seconds is None:
        return Reason("rank", f"ranks behind {winner.name}")
    return Reason(
        "slower",
        f"predicted {loser.seconds * 1e3:.3f} ms a token of an answer, its share of prompts "
        f"included, against {winner.seconds * 1e3:.3f} ms of {winner.name}",
        {"seconds": loser.seconds, "best": winner.seconds},
    )
