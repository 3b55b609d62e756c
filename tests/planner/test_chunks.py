"""How long chunks are where nobody says, and what gives way."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import RefusedError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Decision, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.engine.elsewhere import Elsewhere, describe
from metainfer.planner import search as searching
from metainfer.planner.candidate import Candidate
from metainfer.planner.cards import Cards
from metainfer.planner.chunks import BALANCE, ENOUGH, MOST, enough
from metainfer.planner.opening import OpenedModel, open_model
from metainfer.planner.resolve import Resolved
from metainfer.planner.weights import Census, census
from metainfer.platform.facts import Facts

FLASH, QWEN = "random:deepseek-v4-flash", "random:qwen3-8b"
STEP, MIXED = "limits.step_tokens", "limits.mixed_prefill_tokens"


@cache
def opened(model: str) -> OpenedModel:
    return open_model(model)


@cache
def counted(model: str) -> Census:
    return census(opened(model).arch, opened(model).facts.scheme_of)


def planned(model: str, machine: Elsewhere | None = None, **wishes: object) -> Resolved:
    intent = Intent(model=model, **{"context": 8192, **wishes})  # type: ignore[arg-type]
    return (machine or describe("1x-h200")).resolve(opened(model), intent)


def said(found: Resolved, key: str) -> Decision:
    (decision,) = [each for each in found.plan.decisions if each.key == key]
    return decision


def card(rate: float | None, read: float | None) -> Facts:
    facts = describe("1x-h200").facts
    rates = {} if rate is None else {"bfloat16": rate}
    device = replace(facts.device, dot_flops=rates, read_bytes_s=read)
    return replace(facts, devices=(device,))


def test_a_dense_model_by_hand() -> None:
    """36 layers of 4,096 by 12,288, 32 heads and 8 of keys of 128: 6.95e9 elements a token, 7.57e9
    with the head, which one row of a chunk passes; 2 bytes each; an H200 does 160 FLOPs a byte."""
    layer = 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288
    passed, head = 36 * layer, 151_936 * 4096
    tokens = ENOUGH * 2 * (passed + head) / (2 * passed) * (0.7 * 690e12) / (0.9 * 4.3e12)
    assert 1024 < tokens < 2048
    assert enough(counted(QWEN), card(690e12, 4.3e12), "bfloat16", "throughput") == 2048


def test_a_sparse_model_reads_experts_that_no_token_passes() -> None:
    """V4-Flash holds 277e9 elements of experts in half a byte, and a token passes 12.7e9 in all."""
    assert enough(counted(FLASH), card(690e12, 4.3e12), "bfloat16", "throughput") == MOST
    quick = enough(counted(FLASH), card(69e12, 4.3e12), "bfloat16", "throughput")
    assert quick == 1024  # a tenth of the rate: 577 tokens


@settings(max_examples=40)
@given(
    rate=st.floats(1e12, 5e15), read=st.floats(5e10, 1e13), faster=st.floats(1, 50),
    model=st.sampled_from((FLASH, QWEN)),
)  # fmt: skip
def test_a_faster_card_asks_for_no_shorter_chunk(
    rate: float, read: float, faster: float, model: str
) -> None:
    slow, fast = (
        enough(counted(model), card(each, read), "bfloat16", "ttft")
        for each in (rate, rate * faster)
    )
    assert slow is not None and fast is not None
    assert slow <= fast <= MOST and slow & (slow - 1) == 0 == fast & (fast - 1)


@pytest.mark.parametrize("unknown", ["rate", "read", "both"])
def test_unknown_rates_are_those_of_a_usual_card(unknown: str) -> None:
    rate, read = (None if unknown in (which, "both") else 1e11 for which in ("rate", "read"))
    same = enough(counted(QWEN), card(BALANCE * 1e12, 1e12), "bfloat16", "throughput")
    assert enough(counted(QWEN), card(rate, read), "bfloat16", "throughput") == same


def test_nobody_else_is_told() -> None:
    facts = card(690e12, 4.3e12)
    assert enough(counted(FLASH), facts, "bfloat16", "latency") is None
    assert enough(counted(FLASH), facts, "bfloat16", "context") is None
    host = describe("cpu").facts
    assert enough(counted(FLASH), host, "float32", "throughput") is None


def test_the_plan_says_who_decided() -> None:
    found = planned(FLASH + "?layers=2")
    assert (said(found, STEP).value, said(found, STEP).origin) == (MOST, Origin.COST_MODEL)
    assert (said(found, MIXED).value, said(found, MIXED).origin) == (MOST, Origin.COST_MODEL)
    assert "--goal latency" in said(found, MIXED).why
    dense = planned(QWEN)
    assert (said(dense, STEP).value, said(dense, STEP).origin) == (4096, Origin.SEED)
    assert (said(dense, MIXED).value, said(dense, MIXED).origin) == (2048, Origin.COST_MODEL)
    hurried = planned(FLASH + "?layers=2", goal="latency")
    assert (said(hurried, STEP).value, said(hurried, MIXED).value) == (4096, 512)


def test_the_users_word_wins_and_bounds_the_other() -> None:
    found = planned(FLASH + "?layers=2", chunk_tokens=3000)
    assert (said(found, STEP).value, said(found, STEP).origin) == (3000, Origin.FLAG)
    assert (said(found, MIXED).value, said(found, MIXED).origin) == (3000, Origin.DERIVED)
    assert "8,192 were wished for" in said(found, MIXED).why
    found = planned(FLASH + "?layers=2", mixed_tokens=100)
    assert (said(found, STEP).value, said(found, MIXED).value) == (MOST, 100)


def test_a_step_has_room_for_every_running_sequence() -> None:
    found = planned(FLASH + "?layers=2", concurrency=5000, goal="latency")
    assert (said(found, STEP).value, said(found, STEP).origin) == (5000, Origin.DERIVED)
    found = planned(FLASH + "?layers=2", concurrency=9000)
    assert (said(found, STEP).value, said(found, STEP).origin) == (9000, Origin.DERIVED)
    assert (said(found, MIXED).value, said(found, MIXED).origin) == (MOST, Origin.COST_MODEL)


def test_throughput_never_bounds_prompts_closer_than_latency() -> None:
    """A card of 37 FLOPs a byte is satisfied by 256 tokens of a dense model."""
    there = describe("1x-h200")
    slow = replace(there, facts=card(37e12, 1e12))
    assert enough(counted(QWEN), slow.facts, "bfloat16", "throughput") == 512 // 2
    found = said(planned(QWEN, slow), MIXED)
    assert (found.value, found.origin) == (512, Origin.SEED)


def test_b04_a_path_from_so_many_tokens_on_is_reached() -> None:
    """Halves of a chunk were measured to gain from 8,192 tokens on: chunks of 4,096 never would."""
    found = planned(FLASH + "?layers=2", describe("2x-h200-nop2p"), parallel="tp2")
    assert found.plan.halves == 8192 <= found.plan.limits.step_tokens
    assert found.plan.halves <= found.plan.limits.mixed_prefill_tokens


def test_b04_a_path_that_no_chunk_reaches_is_not_called_on() -> None:
    two = describe("2x-h200-nop2p")
    found = said(planned(FLASH + "?layers=2", two, parallel="tp2", chunk_tokens=4096), "halves")
    ((reason,),) = [loser.reasons for loser in found.losers]
    assert found.value == 0 and reason.code == "chunk"
    assert "at most 4,096 tokens" in reason.message and "8,192" in reason.message
    wish = {"chunk_tokens": 4096, "halves": 6000}
    asked = said(planned(FLASH + "?layers=2", two, parallel="tp2", **wish), "halves")
    assert asked.value == 6000 and "none does it" in asked.why


def test_a_longer_chunk_gives_way_to_memory() -> None:
    """Where a card holds the model with chunks of the seed's length alone, it gets these, and the
    plan says why."""
    model, there = FLASH + "?layers=2", describe("1x-h200")

    def on(memory: int) -> Resolved:
        device = replace(there.facts.device, memory_bytes=memory)
        smaller = replace(there, facts=replace(there.facts, devices=(device,)))
        return planned(model, smaller, context=262_144, concurrency=1)

    low, high = 1 << 30, 141 << 30  # bytes with which it is refused, and with which it is not
    while high - low > 1 << 20:
        middle = (low + high) // 2
        try:
            on(middle)
            high = middle
        except RefusedError:
            low = middle
    least = said(on(high), STEP)
    assert (least.value, least.origin) == (4096, Origin.SEED)
    assert "8,192 left too little memory" in least.why
    assert said(on(high), MIXED).value == 4096
    assert said(on(high + (2 << 30)), STEP).value == MOST


def test_a_longer_chunk_takes_no_second_card() -> None:
    """One card holds the model with chunks of the seed's length: it serves."""
    model, two = FLASH + "?layers=30", describe("2x-h200-nop2p")
    wish = {"context": None, "kv_bytes": 27_500_000_000}
    found = planned(model, two, **wish)
    assert found.plan.layouts[0].name == "single"
    assert (said(found, STEP).value, said(found, STEP).origin) == (4096, Origin.SEED)
    assert "8,192 left too little memory" in said(found, STEP).why
    most = planned(model, two, **wish | {"kv_bytes": 60_000_000_000})
    assert most.plan.layouts[0].ranks == 2 and said(most, STEP).value == MOST


def test_what_memory_refuses_is_said_and_not_what_a_shorter_chunk_would_have_been_told() -> None:
    with pytest.raises(RefusedError, match="lacks the least") as caught:
        planned(FLASH, describe("8x-4090"), mixed_tokens=6000)
    assert caught.value.code == "does_not_fit"


def test_what_no_chunk_could_mend_is_not_judged_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 35 layouts over cards of 24 GB, those that lack less than activations are."""
    asked: list[str] = []
    judge = searching._judge

    def counted_judge(cards: Cards, layout: LayoutPlan, *rest: Any) -> Candidate:
        asked.append(layout.name)
        return judge(cards, layout, *rest)

    monkeypatch.setattr(searching, "_judge", counted_judge)
    with pytest.raises(RefusedError) as caught:
        planned(FLASH, describe("8x-4090"), context=None)
    twice = {name for name in asked if asked.count(name) == 2}
    assert len(set(asked)) == 35 and "tp8cs8" in twice and not {"single", "ep8"} & twice
    needs = {each.data["layout"]: each.data["need"] for each in caught.value.reasons}
    with pytest.raises(RefusedError) as short:
        planned(FLASH, describe("8x-4090"), context=None, chunk_tokens=4096)
    for each in short.value.reasons:  # the numbers of those are of the chunk that is planned
        if each.data["layout"] in twice:
            assert needs[each.data["layout"]] == each.data["need"]
        else:
            assert each.data["need"] > each.data["have"]  # nor would they fit
