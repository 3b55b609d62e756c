"""The plan as the JSON documents that ``plan``, ``/plan`` and ``doctor`` print.

``docs/plan.schema.json`` is their published form.
"""

from __future__ import annotations

from typing import Any

from metainfer.core.digest import to_plain
from metainfer.core.verdict import Reason
from metainfer.planner.candidate import Candidate
from metainfer.planner.memory import total
from metainfer.planner.predict import rates
from metainfer.planner.resolve import Resolved


def plan_document(resolved: Resolved) -> dict[str, Any]:
    """``{"plan", "ledger", "capacity", "layouts", "decisions"}``; see the contracts."""
    plan = resolved.plan
    chosen, lacking = resolved.chosen, resolved.lacking
    planned = lacking.reasons if lacking else ()
    return {
        "plan": plan.to_json(),
        "ledger": [to_plain(row) for row in plan.ledger],
        "capacity": {
            "kv_tokens": plan.kv_tokens,
            "max_context": plan.limits.max_context,
            **_memory(resolved),
            "pairs": _pairs(chosen),
        },
        "layouts": [
            _row(chosen, planned),
            *(_row(each, planned) for each in resolved.layouts if each is not chosen),
        ],
        "decisions": [decision.to_json() for decision in plan.decisions],
    }


def _memory(resolved: Resolved) -> dict[str, int | None]:
    """A card's memory and what its ledger does not explain; None where the size is unknown or
    the system around shares it."""
    rows = [row for row in resolved.plan.ledger if row.memory == "device"]
    held = total([row for row in rows if row.kind != "free"])
    if not any(row.kind == "free" for row in rows):
        return {"device_bytes": None, "held_bytes": held, "unexplained_bytes": None}
    device = resolved.device_bytes
    assert device is not None
    return {
        "device_bytes": device,
        "held_bytes": held,
        "unexplained_bytes": device - total(rows),
    }


def _pairs(candidate: Candidate) -> list[dict[str, int]]:
    return [{"context": context, "concurrency": n} for context, n in candidate.pairs]


def _row(candidate: Candidate, planned: tuple[Reason, ...]) -> dict[str, Any]:
    """One layout. `feasible`: it would fit; `built`: this release can run it, which nothing in
    `planned` forbids."""
    held, prediction = candidate.held, candidate.prediction
    prefill, decode = rates(prediction)
    layout = candidate.layout
    return {
        "name": layout.name,
        "ranks": layout.ranks,
        "tensor": layout.tensor,
        "data": layout.data,
        "expert": layout.expert,
        "prefill": layout.prefill,
        "shards": layout.shards,
        "feasible": candidate.feasible,
        "built": candidate.built and not planned,
        "reasons": [reason.to_json() for reason in (*candidate.reasons, *planned)],
        "kv_tokens": None if held is None else held.kv_tokens,
        "max_context": candidate.longest,
        "weight_bytes": None if held is None else total(held.weights),
        "kv_bytes": None if held is None else held.cache.sizes.bytes(),
        "pairs": _pairs(candidate),
        "prefill_tok_s": prefill,
        "decode_tok_s": decode,
        "prediction": None if prediction is None else prediction.to_json(),
    }
