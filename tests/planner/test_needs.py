"""B-19, B-20: what steps were measured to need bounds what they are given, and moves the split."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import UserError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Decision, Origin
from metainfer.engine.elsewhere import describe
from metainfer.planner import graphs
from metainfer.planner.memory import MARGIN_PART
from metainfer.planner.needs import Needs, Peak, longest_seen, needs_from, nothing_known
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved, resolve

peaks = st.lists(
    st.builds(Peak, st.integers(1, 4096), st.integers(1, 1 << 20), st.integers(0, 1 << 36)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150)
@given(peaks, st.integers(1, 8192), st.integers(1, 1 << 21))
def test_b19_no_step_is_given_less_than_a_smaller_one_was_seen_to_need(
    seen: list[Peak], rows: int, context: int
) -> None:
    needs = Needs(peaks=tuple(seen), ops="")
    given_ = needs.transient_bytes(rows, context)
    under = [peak.bytes for peak in seen if peak.rows <= rows and peak.context <= context]
    assert given_ >= max(under, default=0)
    if not needs.reaches(rows, context):
        assert needs.transient_bytes(rows + 7, context) >= given_
        assert needs.transient_bytes(rows, context + 1000) >= given_
    assert needs_from(needs.to_json()) == needs


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 64))
def test_b19_needs_that_grow_by_a_law_are_extended_by_it(a: int, b: int, d: int) -> None:
    """An indexer's scores: rows times context. Measured to 8K, asked of 1M."""
    sizes = [(r, c) for r in (64, 256, 1024) for c in (2048, 4096, 8192)]
    needs = Needs(peaks=tuple(Peak(r, c, 1 + a + b * r + d * r * c) for r, c in sizes), ops="")
    for rows, context in ((1024, 1 << 20), (4096, 8192)):
        wanted = 1 + a + b * rows + d * rows * context
        assert needs.transient_bytes(rows, context) == pytest.approx(wanted, rel=1e-3, abs=16)


def test_a_record_that_is_something_else_is_an_error() -> None:
    strange: tuple[Any, ...] = ({}, {"peaks": []}, {"peaks": [[1, 2]]}, None)
    for payload in strange:
        with pytest.raises(UserError, match=r"Delete records/capacity .* tune capacity"):
            needs_from(payload)
    empty = Needs(peaks=(), ops="").to_json()
    with pytest.raises(UserError, match="empty"):
        needs_from(empty)


GB = 10**9
LIMITS: dict[str, Any] = {"context": 8192, "concurrency": 2, "chunk_tokens": 512}


def planned(needs: Needs | None, **wishes: Any) -> Resolved:
    """A small model on one H200, whose steps were measured so."""
    intent = Intent(model="random:qwen3-8b?layers=4", **{**LIMITS, **wishes})
    there = describe("1x-h200", intent)
    model = open_model(intent.model)
    return resolve(
        intent,
        model.facts,
        there.facts,
        there.registry,
        there.policy(intent),
        needs=nothing_known if needs is None else (lambda key: needs),
    )


def captured(resolved: Resolved) -> str:
    """The steps that its standing bytes belong to."""
    held = resolved.chosen.held
    assert held is not None
    plan = resolved.plan
    return graphs.key(held.wanted, plan.limits.max_context, plan.shared_beside)


def decision(resolved: Resolved, key: str) -> Decision | None:
    return next((d for d in resolved.plan.decisions if d.key == key), None)


def row(resolved: Resolved, kind: str) -> int:
    return sum(each.bytes for each in resolved.plan.ledger if each.kind == kind)


def test_b20_a_measured_need_moves_the_split_and_the_plan_names_it() -> None:
    seed = planned(None)
    told = decision(seed, "transients")
    assert told is not None and told.origin is Origin.SEED and "tune capacity" in told.why
    needs = Needs(
        peaks=(Peak(512, 8191, 20 * GB),), ops="other", outside_bytes=GB, slack_bytes=GB // 2,
        standing_bytes=GB // 4, captured=captured(seed), origin="tune capacity, today",
    )  # fmt: skip
    found = planned(needs)
    assert row(found, "graphs") == GB // 4 != row(seed, "graphs")
    assert row(found, "transient") == 20 * GB
    device = found.device_bytes or 0
    assert row(found, "reserve") == GB + GB // 2
    margin = {each.item: each.bytes for each in found.plan.ledger}["margin (seed)"]
    assert margin == int(device * MARGIN_PART)
    for key in ("transients", "standing", "reserve"):
        told = decision(found, key)
        assert told is not None and told.origin is Origin.RECORD
        assert "tune capacity, today" in told.why
    assert "measure again" in (decision(found, "transients") or told).why
    # Every byte of the card is still accounted for, and what the cache can have moved.
    assert sum(each.bytes for each in found.plan.ledger) == device
    budgets = [each.chosen.held.budget_bytes for each in (seed, found) if each.chosen.held]
    moved = row(seed, "transient") + row(seed, "reserve")
    moved += row(seed, "graphs")
    kept = row(found, "transient") + row(found, "graphs") + row(found, "reserve") + margin
    assert budgets[1] - budgets[0] == moved - kept


def test_b20_what_other_captured_steps_hold_says_nothing() -> None:
    """Fewer sequences at once, a shorter context, none captured: other results, other tables."""
    key = captured(planned(None))
    needs = Needs(peaks=(Peak(512, 8191, GB),), ops="", standing_bytes=GB, captured=key)
    assert row(planned(needs), "graphs") == GB
    for wishes in ({"concurrency": 3}, {"context": 4096}, {"graphs": False}):
        there, seed = planned(needs, **wishes), planned(None, **wishes)
        assert row(there, "graphs") == row(seed, "graphs") != GB
        assert decision(there, "standing") is None


def test_b20_a_share_that_was_asked_for_beats_a_measured_reserve() -> None:
    needs = Needs(peaks=(Peak(512, 8191, GB),), ops="", outside_bytes=GB, slack_bytes=GB)
    found = planned(needs, memory_share=0.5)
    device = found.device_bytes or 0
    assert row(found, "reserve") == device - int(device * 0.5)
    assert row(found, "transient") == GB


def test_several_ranks_are_not_given_what_one_was_measured_to_need() -> None:
    intent = Intent(
        model="random:tiny-llama", platform="cpu", parallel="tp2", concurrency=2, kv_bytes=1 << 28
    )
    there = describe("cpu", intent)
    needs = Needs(peaks=(Peak(1024, 511, GB),), ops="")
    found = resolve(
        intent,
        open_model(intent.model).facts,
        there.facts,
        there.registry,
        there.policy(intent),
        needs=lambda key: needs,
    )
    assert row(found, "transient") < GB
    assert longest_seen(found.plan.limits) == 511
