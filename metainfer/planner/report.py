"""The plan as the JSON documents that ``plan``, ``/plan`` and ``doctor`` print."""

from __future__ import annotations

from typing import Any

from metainfer.core.digest import to_plain
from metainfer.core.plan import Plan
from metainfer.planner.resolve import SINGLE, Resolved


def plan_document(resolved: Resolved) -> dict[str, Any]:
    """``{"plan", "ledger", "capacity", "layouts", "decisions"}``; see the contracts."""
    plan = resolved.plan
    return {
        "plan": plan.to_json(),
        "ledger": [to_plain(row) for row in plan.ledger],
        "capacity": {"kv_tokens": plan.kv_tokens, "max_context": plan.limits.max_context},
        "layouts": [
            {
                "name": SINGLE,
                "feasible": True,
                "reasons": [],
                "kv_tokens": plan.kv_tokens,
                "prefill_tok_s": None,
                "decode_tok_s": None,
            },
            *_losing_layouts(plan),
        ],
        "decisions": [decision.to_json() for decision in plan.decisions],
    }


def _losing_layouts(plan: Plan) -> list[dict[str, Any]]:
    decided = next(decision for decision in plan.decisions if decision.key == "layouts")
    return [
        {
            "name": loser.value,
            "feasible": False,
            "reasons": [reason.to_json() for reason in loser.reasons],
            "kv_tokens": None,
            "prefill_tok_s": None,
            "decode_tok_s": None,
        }
        for loser in decided.losers
    ]
