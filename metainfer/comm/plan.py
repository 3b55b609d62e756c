"""Which backend and algorithm serve a request: a pure function of what all ranks share.

`choose` sees the request, what each backend says of it, and the tier table; never a clock, a rank
or a file. `auto` takes the table's entry if its backend accepts, else the best estimate among those
that accept, with the reason of every loser. A forced backend that cannot run is an error with every
reason. The plan's digest is what ranks compare (`agree.py`) and its id travels in every flag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metainfer.comm.plan_tiers import Tier, find_tier
from metainfer.comm.request import Precision, Request
from metainfer.core.digest import digest, to_plain
from metainfer.core.errors import RefusedError
from metainfer.core.ledger import Decision, Loser, Origin
from metainfer.core.verdict import ACCEPT, Reason, Verdict

AUTO = "auto"
PLAN_ID_BITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a backend says of one request with one algorithm. `verdict`: every reason against it;
    `us`: estimated microseconds, None when nothing is known; `precision`: of what it delivers."""

    backend: str
    algorithm: str
    verdict: Verdict = ACCEPT
    us: float | None = None
    precision: Precision = Precision.EXACT
    graph_safe: bool = True
    origin: Origin = Origin.COST_MODEL

    @property
    def key(self) -> str:
        return f"{self.backend}:{self.algorithm}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommPlan:
    """One collective, decided. `decision` says who chose it and what lost; it is no part of the
    digest, so a better explanation does not change what ranks compare."""

    request: Request
    backend: str
    algorithm: str
    precision: Precision
    graph_safe: bool
    decision: Decision

    @property
    def digest(self) -> str:
        return digest(self.values())

    @property
    def plan_id(self) -> int:
        """24 bits of the digest; a flag that carries another id was written under another plan."""
        return int(self.digest[: PLAN_ID_BITS // 4], 16)

    def values(self) -> dict[str, object]:
        return {
            "request": to_plain(self.request),
            "backend": self.backend,
            "algorithm": self.algorithm,
            "precision": self.precision.value,
            "graph_safe": self.graph_safe,
        }

    def to_json(self) -> dict[str, object]:
        return {**self.values(), "digest": self.digest, "decision": self.decision.to_json()}


def choose(
    request: Request,
    offers: Sequence[Offer],
    tiers: Sequence[Tier] = (),
    *,
    forced: str = AUTO,
    deterministic: bool = False,
) -> CommPlan:
    """The plan for `request` among `offers`, in the order given (ties go to the first).

    `forced`: ``auto``, a backend, or ``backend:algorithm``. `deterministic` refuses every offer
    that is not exact, also where the request would allow it.

    Raises:
        RefusedError: the request is malformed, the forced backend cannot run, or nobody can; with
            every reason.
    """
    wrong = request.check()
    if not wrong.accepted:
        raise RefusedError(
            f"{request.name} cannot be planned.",
            "This is a defect of its caller; report it.",
            reasons=wrong.reasons,
        )
    judged = [(offer, _judge(request, offer, deterministic)) for offer in offers]
    wanted = [
        (offer, verdict) for offer, verdict in judged if forced in (AUTO, offer.backend, offer.key)
    ]
    able = [offer for offer, verdict in wanted if verdict.accepted]
    if not able:
        raise _refusal(request, forced, wanted, offers)
    tier = find_tier(tiers, request.bytes)
    if forced != AUTO:
        best = _fastest(able)
        origin, why = Origin.FLAG, f"{forced} was asked for"
    elif tier is not None and (named := [x for x in able if x.key == tier.method]):
        best = named[0]
        origin, why = tier.origin, tier.why
    else:
        best = _fastest(able)
        origin, why = best.origin, _why(best)
        if tier is not None:
            why += f"; the table's {tier.method} does not apply"
    losers = tuple(
        Loser(offer.key, verdict.reasons or _slower(offer, best, forced))
        for offer, verdict in judged
        if offer is not best
    )
    key = f"comm.{request.op}.{request.dtype}.{request.bytes}"
    return CommPlan(
        request=request,
        backend=best.backend,
        algorithm=best.algorithm,
        precision=best.precision,
        graph_safe=best.graph_safe,
        decision=Decision(key, best.key, origin, why, losers),
    )


def plan_digest(plans: Sequence[CommPlan]) -> Mapping[str, object]:
    """What a rank shows the others before the first call: one entry per plan, by its request."""
    return {plan.decision.key: plan.values() for plan in plans}


def _judge(request: Request, offer: Offer, deterministic: bool) -> Verdict:
    reasons = list(offer.verdict.reasons)
    exact = request.precision is Precision.EXACT or deterministic
    if exact and offer.precision is not Precision.EXACT:
        reasons.append(
            Reason("precision", f"{offer.key} rounds more than once, and exact was asked for")
        )
    if request.captured and not offer.graph_safe:
        reasons.append(Reason("graph", f"{offer.key} cannot run inside a graph"))
    return Verdict(tuple(reasons))


def _fastest(able: Sequence[Offer]) -> Offer:
    """The least estimate; one without an estimate only when none has one."""
    return min(able, key=lambda offer: float("inf") if offer.us is None else offer.us)


def _why(best: Offer) -> str:
    return "first that can run it" if best.us is None else f"estimated {best.us:.1f} us"


def _slower(offer: Offer, best: Offer, forced: str) -> tuple[Reason, ...]:
    if offer.us is not None and best.us is not None and offer.us >= best.us:
        data = {"us": offer.us, "best_us": best.us}
        text = f"estimated {offer.us:.1f} us against {best.us:.1f}"
        return (Reason("slower", text, data),)
    if forced not in (AUTO, offer.backend, offer.key):
        return (Reason("forced", f"{forced} was asked for"),)
    return (Reason("order", f"{best.key} stands before it"),)


def _refusal(
    request: Request,
    forced: str,
    wanted: Sequence[tuple[Offer, Verdict]],
    offers: Sequence[Offer],
) -> RefusedError:
    reasons = [
        Reason(reason.code, f"{offer.key}: {reason.message}", reason.data)
        for offer, verdict in wanted
        for reason in verdict.reasons
    ]
    if forced == AUTO:
        return RefusedError(
            f"no backend can run {request.name}.",
            "Remove what stands against one of them, or take a layout that sends no such message "
            "(--parallel).",
            reasons=reasons,
        )
    known = ", ".join(dict.fromkeys(offer.backend for offer in offers)) or "none"
    if not wanted:
        reasons = [Reason("backend", f"{forced} is not among the backends: {known}")]
    return RefusedError(
        f"{forced} was asked for and cannot run {request.name}.",
        "Let it be chosen (auto), or remove what stands against it.",
        reasons=reasons,
    )
