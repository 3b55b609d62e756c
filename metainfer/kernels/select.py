"""Selection in two stages: a feasible bundle first, then each op inside it.

A *bundle* fixes what several ops share: the packing of weights, the layout of cache pages. A
machine cannot hold two packings of the same weights, so the ops cannot choose alone. For every
candidate bundle each (site, phase) of the model is resolved; a bundle with an unserved site is
refused with the reasons of every implementation at that site.

Pure: facts + requests + records in, choices with all losers out. No device, no weights, no torch.
Runs once, at start; the hot path looks a name up in the table made from the result.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache

from metainfer.core.errors import RefusedError
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason, Verdict, all_of, require
from metainfer.kernels.bundles import candidate_layouts, check_pins, pin_of, roles_of
from metainfer.kernels.choice import (
    Bundle,
    Candidate,
    Choice,
    Policy,
    RefusedBundle,
    Selection,
    Unserved,
)
from metainfer.kernels.impl import Context, OpRequest, Quality
from metainfer.kernels.refusal import refusal, unserved_reasons
from metainfer.kernels.registry import Registry
from metainfer.kernels.select_op import cost_key, select_op
from metainfer.platform.facts import Facts

Outcomes = dict[tuple[tuple[Hashable, ...], tuple[str | None, ...]], Choice | Unserved]
"""By request, and by those layouts that its op's candidates need."""


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
    feasible.sort(key=lambda bundle: (_reference_sites(bundle), cost_key(bundle.seconds)))
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
