"""One implementation for one (site, phase), inside the layouts that a bundle fixed.

What an implementation declares is held against the request, the machine and the records; the order
of those that are left is in `select_op`. A loser keeps every reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.verdict import Reason, Verdict, all_of, reject, require
from metainfer.kernels.bundles import pin_of
from metainfer.kernels.choice import Candidate, Choice, Policy, Unserved
from metainfer.kernels.impl import Context, Evidence, Impl, Numerics, OpRequest, Quality
from metainfer.kernels.registry import Registry
from metainfer.platform.facts import Facts


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
            cost_key(costs[impl.name]),
            -impl.priority,
            order[impl.name],
        ),
    )
    why = _why(winner, eligible, costs, policy, context)
    losers = tuple(
        _loser(impl, winner, verdicts[impl.name], costs) for impl in impls if impl is not winner
    )
    return _choice(winner, context, policy, why, losers, costs)


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


def cost_key(seconds: float | None) -> tuple[bool, float]:
    """What unknown costs sort behind."""
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
