"""B-03, B-04, B-07: what our own plans look up depends on shapes of a rank and facts of a card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metainfer.core.intent import Intent
from metainfer.core.step import Phase
from metainfer.core.verdict import Verdict, require
from metainfer.engine.elsewhere import describe
from metainfer.kernels.choice import Policy
from metainfer.kernels.evidence import evidence_for
from metainfer.kernels.impl import Context, Evidence, Impl
from metainfer.kernels.select import select
from metainfer.models.registry import random_config, read_arch
from metainfer.ops.attn_paged.tiles import HEAD_DIMS
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved, resolve

THRESHOLD = 2048
TALL = "linear/tall"


def _tall(context: Context) -> Verdict:
    rows = context.request.shape["rows"]
    return require(rows >= THRESHOLD, "rows", f"pays from {THRESHOLD} rows, there are {rows}")


def resolved_with_a_threshold(chunk: int, parallel: str) -> Resolved:
    """V4's shapes on eight cards, with one product kernel that pays from a number of rows on."""
    intent = Intent(
        model="random:deepseek-v4-flash?layers=4",
        parallel=parallel,
        chunk_tokens=chunk,
        context=65_536,
        concurrency=8,
    )
    there = describe("8x-rtx-pro-6000", intent)
    there.registry.add(
        Impl(
            op="linear",
            name="tall",
            load="metainfer.ops.linear.ref:linear",
            provider="vendor",
            dtypes=frozenset({"bfloat16"}),
            conditions=(_tall,),
            requires_layout={"weight": "dense@1"},
            cost=lambda context: 1e-9,
        )
    )
    policy = there.policy(intent)
    proven = replace(
        policy,
        evidence={**policy.evidence, TALL: Evidence.THIS_CARD},
        layout_pins={"weight": "dense@1"},
        allow_fallback=frozenset({"all"}),
        min_evidence=Evidence.NONE,
    )
    return resolve(intent, open_model(intent.model).facts, there.facts, there.registry, proven)


@pytest.mark.parametrize(
    ("chunk", "parallel", "rows"),
    [
        (4096, "tp8", 4096),  # every rank of a tensor group sees every row
        (4096, "ep8", 4096),  # and each domain a chunk of its own
        (4096, "cp8/tp8", 512),  # a chunk that is dealt over eight ranks
        (16_384, "cp8/tp8", 2048),
        (16_376, "cp8/tp8", 2047),
    ],
)
def test_b04_a_threshold_is_applied_to_the_rows_of_a_rank(
    chunk: int, parallel: str, rows: int
) -> None:
    """The plan takes the kernel from so many rows of a rank on, and says with both numbers why
    not below."""
    plan = resolved_with_a_threshold(chunk, parallel).plan
    decision = next(d for d in plan.decisions if d.key == "ops.linear.wq_b@chunk")
    assert (decision.value == TALL) == (rows >= THRESHOLD)
    if rows < THRESHOLD:
        (lost,) = [loser for loser in decision.losers if loser.value == "tall"]
        assert [reason.message for reason in lost.reasons] == [
            f"pays from {THRESHOLD} rows, there are {rows}"
        ]
    short = next(d for d in plan.decisions if d.key == "ops.linear.wq_b@decode")
    assert short.value != TALL  # a decode has its own rows


@pytest.mark.parametrize("head", [32, 64, 72, 96, 128, 200, 256])
def test_b03_a_head_width_is_instantiated_or_refused_with_those_that_are(head: int) -> None:
    """The plan says so, and another implementation serves: nothing is launched beside its sizes."""
    there = describe("8x-rtx-pro-6000")
    config: dict[str, Any] = {**random_config("qwen3-8b", {}), "head_dim": head}
    asked = read_arch(config, "test").op_requests(Phase.DECODE, 8, 8, "bfloat16", {}, 64)
    policy = Policy(evidence=evidence_for(there.facts), min_evidence=Evidence.COMPILED)
    chosen = select(there.registry, asked, there.facts, policy).bundle
    (attention,) = [c for c in chosen.choices if c.request.op == "attn_paged"]
    assert (attention.impl.provider == "triton") == (head in HEAD_DIMS)
    told = {
        lost.impl: reason.message
        for lost in attention.rejected
        for reason in lost.reasons
        if reason.code == "instantiation"
    }
    listed = ", ".join(map(str, HEAD_DIMS))
    refused = (
        {}
        if head in HEAD_DIMS
        else dict.fromkeys(
            (i.name for i in there.registry.of("attn_paged") if i.provider == "triton"),
            f"d is {head}; instantiated for {listed}",
        )
    )
    assert told == refused


NAMES = (
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA RTX PRO 6000D",
)


@pytest.mark.parametrize("hidden", [4096, 5120, 6144, 7168])
def test_b07_no_table_is_looked_up_by_a_products_name_or_one_size(hidden: int) -> None:
    """Four names of one chip get the same kernels with the same evidence, whatever the width; none
    is taken without a reason that is said."""
    there = describe("8x-rtx-pro-6000")
    config: dict[str, Any] = {**random_config("qwen3-8b", {}), "hidden_size": hidden}
    arch = read_arch(config, "test")
    asked = [
        request
        for phase in (Phase.CHUNK, Phase.DECODE)
        for request in arch.op_requests(phase, 64, 8, "bfloat16", {}, 64)
    ]
    found = []
    for name in NAMES:
        device = replace(there.facts.device, name=name)
        facts = replace(there.facts, devices=(device,) * 8)
        policy = Policy(evidence=evidence_for(facts), min_evidence=Evidence.COMPILED)
        chosen = select(there.registry, asked, facts, policy).bundle
        found.append([(c.request.site, c.impl.id, c.evidence, c.why) for c in chosen.choices])
    assert all(each == found[0] for each in found)
    assert all(why for *_, why in found[0])
    strange = replace(there.facts.device, name=NAMES[0], capability=(7, 5))
    assert evidence_for(replace(there.facts, devices=(strange,))) != evidence_for(there.facts)
