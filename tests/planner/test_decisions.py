"""What the resolver decides for a card that is not here, and what it writes down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Decision, Origin
from metainfer.core.plan import DraftPlan, LayoutPlan, Limits
from metainfer.core.step import Phase
from metainfer.kernels.audit import target_facts
from metainfer.kernels.choice import Policy
from metainfer.kernels.impl import Evidence
from metainfer.models.registry import random_config, read_arch
from metainfer.ops.catalog import builtin_registry
from metainfer.ops.workspaces import FILTER_BYTES
from metainfer.planner.graphs import GRAPH_BYTES, LAUNCH_S, SHORT_CHUNK, launch_bound, wanted
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved, resolve
from metainfer.platform.facts import Facts

MODEL = open_model("random:qwen3-8b?layers=2").facts
REGISTRY = builtin_registry()


def card() -> Facts:
    facts = target_facts("sm_120", {"triton": "3.7.1", "torch": "2.13.0"})
    device = replace(facts.device, memory_bytes=96 << 30, read_bytes_s=1.5e12)
    return replace(facts, devices=(device,))


def resolved(without: tuple[str, ...] = (), **intent: Any) -> Resolved:
    policy = Policy(
        min_evidence=Evidence.NONE, pins=intent.get("ops", {}), allow_fallback=frozenset({"all"})
    )
    wish = Intent(model="random:qwen3-8b?layers=2", **intent)
    return resolve(wish, MODEL, card(), REGISTRY.without(*without), policy)


def decision(plan: Resolved, key: str) -> Decision:
    (found,) = [d for d in plan.plan.decisions if d.key == key]
    return found


def test_b08_the_page_is_decided_before_the_kernels_that_have_conditions_on_it() -> None:
    usual = resolved()
    assert usual.plan.ops["attn_paged@decode"].impl == "attn_paged/triton-split"
    odd = resolved(page_tokens=48)
    assert odd.plan.ops["attn_paged@decode"].impl == "attn_paged/torch"
    lost = {loser.value: loser.reasons for loser in decision(odd, "ops.attn_paged@decode").losers}
    assert [r.message for r in lost["triton-split"]] == ["page is 48; instantiated for 16, 32, 64"]
    with pytest.raises(RefusedError, match="page is 48"):
        resolved(page_tokens=48, ops={"attn_paged": "triton"})
    for plan in (usual, odd):
        asked = [c.request for c in plan.selection.bundle.choices]
        pages = {r.shape["page"] for r in asked if r.op in ("attn_paged", "kv_write")}
        assert pages == {plan.plan.kv_groups[0].page_tokens}


def test_rope_is_asked_for_what_the_model_needs() -> None:
    config = random_config("tiny-llama", {})

    def needs(**rope: object) -> frozenset[str]:
        arch = read_arch({**config, **rope}, "test")
        (asked,) = [
            r for r in arch.op_requests(Phase.DECODE, 1, 1, "float32", {}, 16) if r.op == "rope"
        ]
        return asked.semantics

    assert needs() == frozenset()
    assert needs(partial_rotary_factor=0.5) == {"partial"}


def test_decode_graphs_are_a_decision_and_what_prevents_them_shows() -> None:
    """Law 1: decode that runs op by op on a card says which kernels cannot be captured."""
    plan = resolved(concurrency=6)
    assert plan.plan.graph_buckets == (6, 4, 2, 1)
    assert decision(plan, "graph_buckets").origin is Origin.SEED
    eager = resolved(without=("kv_write/triton",), concurrency=6)
    assert eager.plan.graph_buckets == ()
    losers = {loser.value: loser.reasons for loser in decision(eager, "graph_buckets").losers}
    assert set(losers) == {"decode graphs", "chunk graphs", "mixed graphs"}
    assert [reason.message for reason in losers["decode graphs"]] == [
        "kv_write/torch at kv_write cannot be captured"
    ]


def test_draws_that_no_graph_holds_are_told_by_phase() -> None:
    """Law 1: steps are captured, and the plan says where their draws are not."""
    assert not decision(resolved(concurrency=6), "graph_buckets").losers
    plan = resolved(without=("sample/triton",), concurrency=6)
    assert plan.plan.graph_buckets == (6, 4, 2, 1)
    losers = {loser.value: loser.reasons for loser in decision(plan, "graph_buckets").losers}
    assert set(losers) == {"decode draws", "chunk draws", "mixed draws"}
    (reason,) = losers["decode draws"]
    assert reason.message == "sample/torch at sample cannot be captured"


def test_chunks_are_captured_up_to_what_a_step_holds() -> None:
    plan = resolved(concurrency=6, chunk_tokens=130).plan
    shapes = [(g.phase, g.tokens, g.runs) for g in plan.graphs]
    assert shapes[:2] == [("chunk", 128, 4), ("mixed", 70, 6)]  # the largest first
    assert [tokens for _, tokens, _ in shapes] == sorted((t for _, t, _ in shapes), reverse=True)
    assert {g.tokens for g in plan.graphs if g.phase == "decode"} == set(plan.graph_buckets)
    assert resolved(concurrency=6, chunk_tokens=130).plan.fingerprint == plan.fingerprint


LIMITS = Limits(
    max_context=8192, max_running=8, step_tokens=4096, mixed_prefill_tokens=500, max_waiting=9
)


def test_chunks_are_captured_while_launches_hold_them_up() -> None:
    def sizes(longest: int) -> tuple[list[int], list[int]]:
        layout, draft = LayoutPlan(name="x"), DraftPlan(method="ngram", depth=0)
        shapes = wanted("cuda", 8, LIMITS, draft, layout, longest)
        alone = sorted(shape.tokens for shape in shapes if shape.phase == "chunk")
        return alone, sorted(shape.tokens - 8 for shape in shapes if shape.phase == "mixed")

    assert sizes(SHORT_CHUNK) == ([64, 128, 256], [64, 128, 256])
    assert sizes(1100) == ([64, 128, 256, 512, 768, 1024], [64, 128, 256, 512])  # mixed: up to 500
    assert sizes(99999)[0][-1] == LIMITS.step_tokens


@given(launches=st.floats(1, 1e4), flops=st.floats(1e6, 1e12), rate=st.floats(1e12, 1e16))
def test_the_longest_launch_bound_chunk_takes_as_long_as_its_launches(
    launches: float, flops: float, rate: float
) -> None:
    tokens = launch_bound(launches, flops, rate)
    busy = tokens * flops / (rate / 2)
    assert tokens == SHORT_CHUNK or busy <= launches * LAUNCH_S < busy + flops / (rate / 2) * 1.001
    assert launch_bound(launches, flops, None) == SHORT_CHUNK
    assert launch_bound(launches, flops, rate, talks=True) in (SHORT_CHUNK, tokens // 2)


def test_what_ranks_share_is_not_captured() -> None:
    def phases(**degrees: int) -> set[str]:
        layout = LayoutPlan(name="x", **degrees)
        draft = DraftPlan(method="ngram", depth=2)
        return {shape.phase for shape in wanted("cuda", 8, LIMITS, draft, layout)}

    assert phases() == phases(tensor=2) == {"decode", "verify", "chunk", "mixed"}
    assert phases(data=2) == phases(data=2, prefill=2) == {"decode"}
    assert phases(tensor=2, prefill=2) == {"decode", "mixed"}
    assert phases(tensor=2, shards=2) == {"decode", "verify"}
    assert phases(data=2, tensor=2, shards=2) == {"decode"} and phases(context=2) == set()


def test_captured_steps_are_in_the_ledger_or_left_over() -> None:
    plan = resolved(concurrency=6).plan
    (row,) = [row for row in plan.ledger if row.kind == "graphs"]
    rows = [g.tokens if g.phase == "decode" else g.runs for g in plan.graphs]
    logits = (4 * sum(rows) + FILTER_BYTES * max(rows)) * plan.model.vocab_size
    assert row.bytes > len(plan.graphs) * GRAPH_BYTES + logits
    eager = resolved(without=("kv_write/triton",), concurrency=6).plan
    assert not [row for row in eager.ledger if row.kind == "graphs"]
    assert sum(row.bytes for row in eager.ledger) == sum(row.bytes for row in plan.ledger)


def test_a_bound_that_the_step_sets_is_derived() -> None:
    key = "limits.mixed_prefill_tokens"
    assert decision(resolved(goal="latency"), key).origin is Origin.SEED
    assert decision(resolved(), key).origin is Origin.COST_MODEL
    short = resolved(chunk_tokens=100, concurrency=4)
    assert short.plan.limits.mixed_prefill_tokens == 100
    assert decision(short, key).origin is Origin.DERIVED


def test_the_bound_on_prompts_beside_answers_is_the_users_to_set() -> None:
    found = resolved(mixed_tokens=96)
    assert found.plan.limits.mixed_prefill_tokens == 96
    assert decision(found, "limits.mixed_prefill_tokens").origin is Origin.FLAG
    with pytest.raises(UsageError, match="do not fit into a step of 64"):
        resolved(mixed_tokens=96, chunk_tokens=64, concurrency=1)
    with pytest.raises(UsageError, match="must be at least 1"):
        resolved(mixed_tokens=0)


def test_whether_steps_are_read_late_says_what_stands_against_it() -> None:
    def against(found: Resolved) -> list[str]:
        chosen = decision(found, "overlap")
        assert chosen.origin is Origin.DERIVED and chosen.value is found.plan.overlap
        assert found.plan.overlap is not bool(chosen.losers)
        return [reason.code for loser in chosen.losers for reason in loser.reasons]

    assert against(resolved()) == []
    assert against(resolved(graphs=False, draft="ngram:2")) == ["graph", "draft"]
    from test_spread_contexts import planned

    tp = planned("random:qwen3-8b?layers=4", context=8192, parallel="tp8")
    assert against(tp) == []  # ranks launch ahead, each by itself
