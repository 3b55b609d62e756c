"""The user's word in a plan: who gave it, from where, and the share of memory that may be used."""

from __future__ import annotations

from typing import Any

import pytest
from test_decisions import MODEL, REGISTRY, card, decision, resolved

from metainfer.core.errors import UsageError
from metainfer.core.intent import DECISIONS, Intent
from metainfer.core.ledger import Origin
from metainfer.kernels.choice import Policy
from metainfer.planner.resolve import resolve


def test_a_decision_says_which_line_of_which_file_set_it() -> None:
    said = "--context set by --config serve.toml line 3"
    plan = resolved(context=4096, origins={"context": Origin.FILE}, said={"context": said})
    found = decision(plan, "limits.max_context")
    assert (found.origin, found.why) == (Origin.FILE, f"asked for; {said}")
    assert plan.plan.fingerprint == resolved(context=4096).plan.fingerprint  # reasons do not count


def test_pins_carry_where_they_came_from() -> None:
    origins = {"ops": Origin.FILE}
    plan = resolved(ops={"rmsnorm": "torch"}, origins=origins, said={"ops": "set by f line 2"})
    pinned = [d for d in plan.plan.decisions if d.origin is Origin.FILE]
    assert pinned and all("rmsnorm" in d.key and "set by f line 2" in d.why for d in pinned)
    others = [d for d in plan.plan.decisions if d.origin is not Origin.FILE]
    assert not any("set by" in d.why for d in others)


def test_every_wish_names_a_decision_of_the_plan() -> None:
    keys = {d.key for d in resolved().plan.decisions} | {
        "ops",
        "goal_layout",
        "collectives",
        "emulated",
    }
    assert set(DECISIONS.values()) <= keys
    wishes = set(Intent.__dataclass_fields__) - {"origins", "said"}
    assert set(DECISIONS) == wishes


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_no_more_than_the_share_of_memory_is_used(share: float) -> None:
    wish = {"memory_share": share, "concurrency": 4096, "chunk_tokens": 4096}
    plan = resolved(**wish)
    memory = card().device.memory_bytes
    assert memory is not None
    used = sum(
        row.bytes
        for row in plan.plan.ledger
        if row.memory == "device" and row.kind not in ("reserve", "free")
    )
    assert used <= share * memory
    assert used > share * memory - (64 << 20)  # the cache takes what there is
    assert f"at most {share:.0%} of the memory" in decision(plan, "kv_tokens").why


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, 90, float("nan")])
def test_a_share_is_a_part(share: float) -> None:
    wish: Any = Intent(model="m", memory_share=share)
    with pytest.raises(UsageError, match="memory-share"):
        resolve(wish, MODEL, card(), REGISTRY, Policy())


def test_one_bound_on_waiting_requests() -> None:
    """What `--max-pending` says is what the scheduler holds, by default too."""
    from metainfer.server.state import ServerConfig

    usual = resolved()
    assert usual.plan.limits.max_waiting == ServerConfig(("m",)).max_pending
    assert decision(usual, "limits.max_waiting").origin is Origin.DEFAULT
    asked = resolved(max_waiting=7)
    assert asked.plan.limits.max_waiting == 7
    assert decision(asked, "limits.max_waiting").origin is Origin.FLAG


FOLLOWS = {
    "phase_layout": "parallel",
    "kv_domains": "parallel",
    "graphs": "graphs",
    "prefill_layout": "parallel",
    "decode_layout": "parallel",
    "joint_layout": "parallel",
    "phases_apart": "parallel",
}
"""Decisions that say what follows from another, and the wish that moves that one."""
FOUND = ("speed", "transients", "standing", "reserve", "device", "machine", "evidence", "software")
"""What is read or measured; a record of this machine, or a machine file, is its override."""

OVERRIDES: dict[str, tuple[Any, str]] = {
    "dtype": ("float16", "model.dtype"),
    "context": (4096, "limits.max_context"),
    "concurrency": (7, "limits.max_running"),
    "max_waiting": (3, "limits.max_waiting"),
    "kv_bytes": (1 << 30, ""),
    "memory_share": (0.1, ""),
    "page_tokens": (32, "kv_groups"),
    "chunk_tokens": (2048, "limits.step_tokens"),
    "mixed_tokens": (64, "limits.mixed_prefill_tokens"),
    "threads": (3, "threads"),
    "prefix_cache": (False, "prefix_cache"),
    "graphs": (False, "graph_buckets"),
    "overlap": (False, "overlap"),
    "draft": ("ngram:3", "draft"),
    "ops": ({"rmsnorm": "torch"}, ""),
    "layouts": ({"weight": "dense@1"}, "bundle"),
    "parallel": ("single", "layouts"),
}
"""Wish -> a value that is not the planner's own, and the decision that must say whose it is."""


def test_every_decision_is_someones_to_override_or_says_what_it_follows() -> None:
    from test_spread_contexts import planned

    wishes = set(DECISIONS.values())
    for found in (resolved(), planned(), planned("random:qwen3-8b?layers=4", context=8192)):
        for each in found.plan.decisions:
            key = "ops" if each.key.startswith("ops.") else each.key
            assert key in wishes or key in FOLLOWS or key in FOUND, key
    assert set(FOLLOWS.values()) <= set(DECISIONS)


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_is_honoured_and_says_whose_it_is(name: str) -> None:
    value, key = OVERRIDES[name]
    usual, asked = resolved(), resolved(**{name: value})
    own = ("parallel", "layouts")  # here the planner's own, so that only their author changes
    assert (asked.plan.fingerprint != usual.plan.fingerprint) is (name not in own)
    if key:
        found = decision(asked, key)
        assert found.origin is Origin.FLAG, (found.origin, found.why)
        assert decision(usual, key).origin is not Origin.FLAG
    elif name == "ops":
        pinned = [d for d in asked.plan.decisions if d.origin is Origin.FLAG]
        assert len(pinned) > 1 and all("rmsnorm" in d.key or d.key == "model" for d in pinned)
    else:
        assert asked.plan.kv_tokens < usual.plan.kv_tokens
    given = {name: Origin.FILE}
    moved = resolved(**{name: value}, origins=given).plan
    assert moved.fingerprint == asked.plan.fingerprint
    assert any(d.origin is Origin.FILE for d in moved.decisions) or not key


def test_no_steps_are_captured_where_nobody_wants_it() -> None:
    asked = resolved(graphs=False)
    assert asked.plan.graphs == () == asked.plan.graph_buckets
    held = [row.item for row in asked.plan.ledger]
    assert not any("captured" in item for item in held)
    kept, free = (resolved(graphs=wish, memory_share=0.1).plan for wish in (True, False))
    assert free.kv_tokens > kept.kv_tokens  # what they would hold is the cache's
