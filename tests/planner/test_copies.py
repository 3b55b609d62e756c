"""B-19: what kernels copy of the cache is a row of the memory ledger, at the limits of the plan."""

from __future__ import annotations

from typing import Any

import pytest
from test_spread_contexts import planned

from metainfer.core.intent import Intent
from metainfer.core.plan import Plan
from metainfer.engine.elsewhere import describe
from metainfer.ops.attn_sparse.tiles import HELD_BYTES
from metainfer.planner.needs import Needs, Peak
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import resolve

V4, DENSE = "random:deepseek-v4-flash?layers=4", "random:qwen3-8b?layers=4"
CONTEXT, RUNNING, STEP = 32_768, 8, 4096


def copied(plan: Plan) -> dict[str, int]:
    rows = {row.item: row.bytes for row in plan.ledger if row.kind == "transient"}
    return {item: size for item, size in rows.items() if item.startswith("copies")}


def entries(running: int, context: int = CONTEXT) -> int:
    """Of latents with scales as bfloat16: all entries at ratio 4, this chunk's tokens, and of each
    request its window and five pages of 256 tokens."""
    near = STEP + running * (128 + 5 * 256)
    return min(running * (context // 4) * 1024, HELD_BYTES) + near * 1024


@pytest.mark.parametrize(("running", "context"), [(8, CONTEXT), (64, 1 << 20)])
def test_b19_scaled_latents_decoded_for_a_chunk_are_counted(running: int, context: int) -> None:
    wishes: dict[str, Any] = {"context": context, "concurrency": running}
    plan = planned.__wrapped__(V4, "1x-h200", **wishes, layouts={"kv": "latent-fp8@1"}).plan
    assert copied(plan) == {"copies of cached entries": entries(running, context)}


def test_b19_plain_latents_are_not_copied() -> None:
    wishes: dict[str, Any] = {"context": CONTEXT, "concurrency": RUNNING}
    plan = planned.__wrapped__(V4, "1x-h200", **wishes, layouts={"kv": "latent@1"}).plan
    assert copied(plan) == {}


def test_b19_keys_and_values_that_are_gathered_are_counted() -> None:
    pins = {"attn_paged": "torch"}
    plan = planned.__wrapped__(DENSE, "1x-h200", context=CONTEXT, ops=pins).plan
    masks = 64 << 20
    assert copied(plan) == {"copies of cached entries": CONTEXT * 2 * 8 * 128 * 2 + masks}


def test_b19_beside_a_measured_peak_only_further_requests_are_counted() -> None:
    """What was measured is one request's chunk."""
    there = describe("1x-h200")
    needs = Needs(peaks=(Peak(STEP, CONTEXT - 1, 1 << 30),), ops="", origin="a record")
    wishes: dict[str, Any] = {"context": CONTEXT, "layouts": {"kv": "latent-fp8@1"}}

    def found(running: int) -> Plan:
        intent = Intent(model=V4, concurrency=running, **wishes)
        return resolve(
            intent, open_model(V4).facts, there.facts, there.registry, there.policy(intent),
            needs=lambda key: needs,
        ).plan  # fmt: skip

    further = entries(RUNNING) - entries(1)
    assert copied(found(RUNNING)) == {"copies of cached entries of further requests": further}
    assert copied(found(1)) == {}
    decided = {each.key: each.value for each in found(RUNNING).decisions}
    assert decided["transients"] == 1 << 30  # what was measured, and no other row
