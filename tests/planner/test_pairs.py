"""Which prompts of a pair of layouts are computed as decodes are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from test_lanes import said

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.engine.elsewhere import describe
from metainfer.planner.graphs import CHUNKS, SHORT_CHUNK
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved

V4 = "random:deepseek-v4-flash?layers=3"
QWEN = "random:qwen3-8b?layers=4"


@cache
def planned(layout: str, machine: str = "2x-h200-nop2p", **wishes: Any) -> Resolved:
    intent = Intent(model=V4, parallel=layout, context=8192, concurrency=8, **wishes)
    return describe(machine).resolve(open_model(V4), intent)


def mixed(found: Resolved) -> list[int]:
    """Prompt tokens of the captured steps that hold some."""
    graphs = [each for each in found.plan.graphs if each.phase != "decode"]
    assert {each.phase for each in graphs} <= {"mixed"}
    return sorted(each.tokens - each.runs for each in graphs)


def activations(found: Resolved) -> str:
    (item,) = (row.item for row in found.plan.ledger if row.item.startswith("activations"))
    return item


def test_as_far_as_launches_hold_them_up() -> None:
    """As the decode layout alone captures chunks; where no matrix rate is known, the shortest."""
    found, alone = planned("cp2/tp2"), planned("tp2")
    captured = [each.tokens for each in alone.plan.graphs if each.phase == "chunk"]
    assert mixed(found) == sorted(captured) and max(captured) > SHORT_CHUNK
    assert found.plan.prefill_from == max(captured) + 1
    assert said(found, "prefill_from") == (max(captured) + 1, Origin.SEED, [])
    unknown = planned("cp8/tp8", "8x-rtx-pro-6000d")
    assert unknown.plan.prefill_from == SHORT_CHUNK + 1
    assert mixed(unknown) == [tokens for tokens in CHUNKS if tokens <= SHORT_CHUNK]


@pytest.mark.parametrize(
    ("layout", "wishes", "code"),
    [
        ("tp2", {}, "layout"),
        ("cp2/tp2cs2", {}, "not-built"),
        ("cp2/dp2ep2", {}, "graph"),  # domains would have to take the same bucket
        ("cp2/tp2", {"graphs": False}, "graph"),
    ],
)
def test_where_nothing_is_gained_every_chunk_follows_its_layout(
    layout: str, wishes: dict[str, Any], code: str
) -> None:
    found = planned(layout, **wishes)
    assert said(found, "prefill_from") == (0, Origin.DERIVED, [code])
    assert found.plan.prefill_from == 0


def test_who_asks_decides_and_no_more_is_captured() -> None:
    found = planned("cp2/tp2", prefill_from=600)
    assert said(found, "prefill_from") == (600, Origin.FLAG, [])
    assert mixed(found) == [tokens for tokens in CHUNKS if tokens < 600]
    assert mixed(planned("cp2/tp2", prefill_from=0)) == []
    assert planned("cp2/dp2ep2", prefill_from=600).plan.prefill_from == 600
    assert planned("tp2", prefill_from=0).plan.prefill_from == 0


def test_the_largest_step_of_either_layout_has_room() -> None:
    """Of a step of 4,096 tokens each of two ranks computes a half, of a short chunk all rows."""
    asked = [
        planned("cp2/tp2", prefill_from=border, chunk_tokens=4096, mixed_tokens=mixed)
        for border, mixed in ((600, 512), (600, 4096), (4096, 512))
    ]
    rows = [activations(found) for found in asked]
    assert rows == [f"activations of {n} tokens" for n in (2048, 2048, 4096)]


def test_the_ledger_counts_by_the_border_of_the_plan() -> None:
    """Drafts beside the prompts are counted, but the border is that of requests: 1,024 prompt
    tokens and 4 of each of 64 requests are more than a step has."""
    intent = Intent(
        model=V4, parallel="cp2/tp2", context=8192, concurrency=64, chunk_tokens=1150,
        draft="ngram:3",
    )  # fmt: skip
    found = describe("2x-h200-nop2p").resolve(open_model(V4), intent)
    assert found.plan.prefill_from == 1025
    assert activations(found) == "activations of 1150 tokens"


def test_without_a_captured_step_prices_speak_of_no_border_either() -> None:
    there = describe("2x-h200-nop2p")
    intent = Intent(model=QWEN, parallel="cp2/tp2", context=8192, allow_fallback=("all",))
    borders = []
    for registry in (there.registry, there.registry.without("kv_write/triton")):
        found = replace(there, registry=registry).resolve(open_model(QWEN), intent)
        (held,) = (each.held for each in found.layouts if each.layout.name == "cp2/tp2")
        assert held is not None and held.prefill_from == found.plan.prefill_from
        borders.append(held.prefill_from)
    assert borders[0] > 0 == borders[1]


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    for layout, text in (("tp2", "no other layout"), ("cp2/tp2cs2", "compute no prompts")):
        with pytest.raises(RefusedError, match=text):
            planned(layout, prefill_from=600)
    with pytest.raises(UsageError, match="prefill-from is -1"):
        planned("cp2/tp2", prefill_from=-1)
