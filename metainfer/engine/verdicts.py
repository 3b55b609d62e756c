"""What `verify` found on this machine, kept with its records; shown by whoever starts the plan.

A verdict belongs to what it proved: the arithmetic of a plan. Sizes of caches and batches do not
count, kernels, layouts, types, drafts and graphs do. A plan that differs in these is not verified,
and the difference is named. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from metainfer import __version__
from metainfer.core.digest import digest, to_plain
from metainfer.core.plan import Plan
from metainfer.core.records import Record, RecordStore

KIND = "verification"


def proven(plan: Plan) -> dict[str, object]:
    """What a verdict is about, by name."""
    return {
        "model": plan.model.reference,
        "type": plan.model.dtype,
        "options": to_plain(plan.model.options),
        "layouts": [layout.name for layout in plan.layouts],
        "bundle": to_plain(plan.bundle),
        "kernels": {site: op.impl for site, op in plan.ops.items()},
        "pages": {group.name: group.page_tokens for group in plan.kv_groups},
        "graphs": [f"{g.phase} {g.tokens}/{g.runs}" for g in plan.graphs],
        "drafts": f"{plan.draft.method}:{plan.draft.depth}",
    }


def keep(store: RecordStore, plan: Plan, passed: bool, failures: Sequence[str], seed: int) -> None:
    """Store the verdict of `plan` as the latest of its model, and under the plan's own key."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    payload = {
        "date": now,
        "plan": plan.fingerprint,
        "passed": passed,
        "failures": list(failures),
        "proven": proven(plan),
    }
    for key in (plan.model.reference, f"{plan.model.reference}@{digest(proven(plan))}"):
        store.put(Record(KIND, key, payload, {"seed": seed, "version": __version__}))


def status(store: RecordStore, plan: Plan) -> dict[str, Any]:
    """``{"verified", "text", ...}`` of `plan` here: by its own verdict, else why it has none.

    `verified` is True only for a verdict that passed and is about this very plan.
    """
    if plan.emulated:
        return {"verified": False, "text": "not verified: emulated, answers mean nothing"}
    now = proven(plan)
    own = store.get(KIND, f"{plan.model.reference}@{digest(now)}")
    latest = own or store.get(KIND, plan.model.reference)
    if latest is None:
        return {"verified": False, "text": "not verified: run metainfer verify"}
    found: Any = latest.payload
    told = {"date": found["date"], "plan": found["plan"], "passed": found["passed"]}
    word = "passed" if found["passed"] else f"failed ({', '.join(found['failures'][:3])})"
    text = f"verified on {found['date'][:10]} at plan {found['plan']}: {word}"
    if own is not None:
        return {"verified": bool(found["passed"]), "text": text, **told}
    changed = [name for name in now if now[name] != found["proven"].get(name)]
    text = f"not verified: {', '.join(changed)} changed; {text}"
    return {"verified": False, "text": text, "changed": changed, **told}
