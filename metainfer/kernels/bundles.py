"""Which layouts can stand together for a model, and whether what the user pinned exists there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from metainfer.core.errors import UsageError
from metainfer.kernels.choice import Policy
from metainfer.kernels.impl import OpRequest
from metainfer.kernels.registry import Registry


def roles_of(registry: Registry, op: str) -> tuple[str, ...]:
    """Whose layouts an op's candidates need: all that a `Context` shows to them."""
    return tuple(sorted({role for impl in registry.of(op) for role in impl.requires_layout}))


def candidate_layouts(
    registry: Registry, requests: Sequence[OpRequest]
) -> tuple[Mapping[str, str], ...]:
    """Every combination of declared layouts, one per role that the requested ops mention."""
    ops = {request.op for request in requests}
    roles: dict[str, dict[str, None]] = {}
    for impl in registry.impls():
        if impl.op in ops:
            for role, layout in impl.requires_layout.items():
                roles.setdefault(role, {})[layout] = None
    names = sorted(roles)
    combos = itertools.product(*(roles[role] for role in names))
    return tuple(dict(zip(names, combo, strict=True)) for combo in combos)


def pin_of(pins: Mapping[str, str], request: OpRequest) -> str | None:
    """The implementation asked for here: by site or op in this phase, else in every phase."""
    names = (request.site, request.op)
    keys = (*(f"{name}@{request.phase}" for name in names), *names)
    return next((pins[key] for key in keys if key in pins), None)


def check_pins(registry: Registry, requests: Sequence[OpRequest], policy: Policy) -> None:
    """Pins and allowances name what this model has.

    Raises:
        UsageError: an op, a role or a layout that it does not.
    """
    known = {request.op for request in requests} | {request.site for request in requests}
    phases = {f"{name}@{r.phase}" for r in requests for name in (r.site, r.op)}
    for key in policy.pins:
        if key not in known | phases:
            raise UsageError(
                f"--op names {key!r}, which this model does not use.",
                f"It uses: {', '.join(sorted(known))}; each in every phase, or as OP@PHASE.",
                code="unknown_op",
            )
    for key in sorted(policy.allow_fallback - known - {"all"}):
        raise UsageError(
            f"--allow-fallback names {key!r}, which this model does not use.",
            f"It uses: {', '.join(sorted(known))}; or all.",
            code="unknown_op",
        )
    offered: dict[str, dict[str, None]] = {}
    for layouts in candidate_layouts(registry, requests):
        for role, layout in layouts.items():
            offered.setdefault(role, {})[layout] = None
    for role, layout in policy.layout_pins.items():
        if role not in offered:
            raise UsageError(
                f"--layout names the role {role!r}, which this model does not have.",
                f"It has: {', '.join(sorted(offered)) or 'none'}.",
                code="unknown_layout",
            )
        if layout not in offered[role]:
            raise UsageError(
                f"this model has no {role} layout {layout!r}.",
                f"There is: {', '.join(offered[role])}.",
                code="unknown_layout",
            )
