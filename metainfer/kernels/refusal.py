"""No bundle serves: every blocker of all bundles in one error, each distinct one once. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from metainfer.core.errors import RefusedError
from metainfer.core.verdict import Reason
from metainfer.kernels.choice import RefusedBundle, Unserved


def refusal(refused: Sequence[RefusedBundle], device: str) -> RefusedError:
    """The error that lists what stands against all of `refused`.

    A reason's data says where it holds: `impl`, `sites` (``site@phase``), `bundles`.
    """
    pins = sorted({f"{u.request.op}={u.pin}" for b in refused for u in b.unserved if u.pin})
    cause = f"no combination of kernels serves this model on {device}."
    remedy = "See `metainfer doctor` for each op; `--allow-fallback all` permits reference paths."
    if pins:
        cause = f"no combination of kernels with {', '.join(pins)} serves this model on {device}."
        remedy = "Remove the pin to let auto choose."
    code = "pin_refused" if pins else "no_bundle"
    return RefusedError(cause, remedy, reasons=distinct(refused), code=code)


def distinct(refused: Sequence[RefusedBundle]) -> tuple[Reason, ...]:
    """Every (implementation, reason) once, in the order of the first bundle that has it."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for bundle in refused:
        for impl, where, reason in _reasons(bundle):
            places = found.setdefault(
                (impl, reason.code, reason.message), {**reason.data, "sites": {}, "bundles": {}}
            )
            places["sites"].update(dict.fromkeys(where))
            places["bundles"][bundle.name] = None
    return tuple(
        Reason(
            code,
            f"{impl}: {message}" if impl else message,
            {**data, "impl": impl, "sites": [*data["sites"]], "bundles": [*data["bundles"]]},
        )
        for (impl, code, message), data in found.items()
    )


def unserved_reasons(unserved: Sequence[Unserved]) -> tuple[Reason, ...]:
    """One reason per (site, phase), which quotes those of all its candidates."""
    return tuple(
        Reason(
            "unserved",
            f"nothing serves {item.request.site} in {item.request.phase}: "
            + "; ".join(
                f"{loser.impl}: {', '.join(reason.message for reason in loser.reasons)}"
                for loser in item.rejected
            ),
            {"site": item.request.site, "phase": item.request.phase.value},
        )
        for item in unserved
    )


def _reasons(bundle: RefusedBundle) -> Iterator[tuple[str, Sequence[str], Reason]]:
    """(implementation id or nothing, places, reason) of one bundle."""
    for reason in bundle.reasons:
        if not bundle.unserved:
            yield "", (), reason
    for item in bundle.unserved:
        request = item.request
        where = (f"{request.site}@{request.phase.value}",)
        if not item.rejected:
            yield request.op, where, Reason("unserved", "no implementation is declared")
        for loser in item.rejected:
            for reason in loser.reasons:
                yield f"{request.op}/{loser.impl}", where, reason
