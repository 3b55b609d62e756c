"""What is computed beside what: off until it is asked for or measured, an error where it cannot."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_spread_contexts import known_rate, planned

from metainfer.comm.topology import no_peer
from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.engine.elsewhere import describe
from metainfer.executor.local import PIECES
from metainfer.planner import gains, graphs, lanes
from metainfer.planner.needs import Needs, Peak
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved, resolve

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
V4 = "random:deepseek-v4-flash?layers=4"
DENSE = "random:qwen3-8b?layers=4"
TINY = "random:tiny-deepseek-v4"


def said(found: Resolved, key: str) -> tuple[object, Origin, list[str]]:
    (each,) = (each for each in found.plan.decisions if each.key == key)
    return each.value, each.origin, [r.code for loser in each.losers for r in loser.reasons]


def test_nothing_takes_turns_unmeasured() -> None:
    found = planned(V4, context=8192, parallel="tp8")
    for key in ("halves", "sum_pieces", "shared_beside"):
        assert said(found, key) == (0, Origin.SEED, ["unmeasured"])
    pair = planned(V4, context=8192, parallel="cp8/tp8")
    assert said(pair, "gathers_beside") == (0, Origin.SEED, ["unmeasured"])


def test_a_shared_chunk_has_its_gathers_beside_where_that_was_measured() -> None:
    wish: dict[str, Any] = {"context": 8192, "parallel": "cp2/tp2", "chunk_tokens": 8192}
    found = planned.__wrapped__(V4, "2x-h200-nop2p", **wish)
    value, origin, _ = said(found, "gathers_beside")
    assert value == found.plan.gathers_beside > 0 and origin is Origin.RECORD
    nccl = planned.__wrapped__(V4, "2x-h200-nop2p", **wish, collectives="nccl")
    assert said(nccl, "gathers_beside")[:2] == (0, Origin.SEED)
    asked = planned.__wrapped__(V4, "2x-h200-nop2p", **wish, gathers_beside=99)
    assert said(asked, "gathers_beside")[:2] == (99, Origin.FLAG)


def test_who_asks_gets_it_and_it_is_said() -> None:
    found = planned(V4, context=8192, parallel="tp8", halves=4096, shared_beside=64)
    assert (found.plan.halves, found.plan.shared_beside) == (4096, 64)
    pair = planned(V4, context=8192, parallel="cp8/tp8", halves=4096)
    assert pair.plan.halves == 4096
    assert said(found, "halves")[:2] == (4096, Origin.FLAG)
    assert said(found, "shared_beside")[:2] == (64, Origin.FLAG)
    off = planned(V4, context=8192, parallel="cp8/tp8", halves=0, sum_pieces=0)
    assert said(off, "halves")[:2] == said(off, "sum_pieces")[:2] == (0, Origin.FLAG)
    shorter = planned(V4, context=8192, parallel="tp8", halves=8192, sum_pieces=4096)
    assert (shorter.plan.halves, shorter.plan.sum_pieces) == (8192, 4096)
    assert said(shorter, "sum_pieces")[:2] == (4096, Origin.FLAG)


@pytest.mark.parametrize(
    ("model", "wish", "reason"),
    [
        (DENSE, {"parallel": "single", "halves": 2}, "no rank waits"),
        (DENSE, {"parallel": "8x", "halves": 2}, "no rank waits"),
        (DENSE, {"parallel": "cp8/tp8", "halves": 2}, "no rank waits"),
        (V4, {"parallel": "tp8cs8", "halves": 2}, "share a cache"),
        (DENSE, {"parallel": "tp8", "shared_beside": 8}, "no shared expert"),
        (V4, {"parallel": "dp8ep8", "shared_beside": 8}, "domains meet"),
        (DENSE, {"parallel": "8x", "sum_pieces": 2}, "no ranks hold parts"),
        (V4, {"parallel": "dp8ep8", "sum_pieces": 2}, "no ranks hold parts.*domains meet"),
        (V4, {"parallel": "cp8/tp8", "sum_pieces": 2}, "by themselves"),
        (V4, {"parallel": "tp8cs8", "sum_pieces": 2}, "share a cache"),
        (V4, {"parallel": "tp8", "halves": 4096, "sum_pieces": 4096}, "turns from 4,096"),
        (V4, {"parallel": "tp8", "gathers_beside": 2}, "do not share the rows"),
        (DENSE, {"parallel": "cp8/tp8", "gathers_beside": 2}, "would compute next"),
    ],
)
def test_what_cannot_be_is_an_error_with_its_reasons(
    model: str, wish: dict[str, object], reason: str
) -> None:
    with pytest.raises(RefusedError, match=reason):
        planned(model, context=8192, **wish)


def test_a_bound_is_a_number_of_tokens() -> None:
    with pytest.raises(UsageError, match="--halves is -1"):
        planned(DENSE, context=8192, parallel="tp8", halves=-1)
    with pytest.raises(UsageError, match="one row has no halves"):
        planned(DENSE, context=8192, parallel="tp8", halves=1)
    with pytest.raises(UsageError, match="--sum-pieces is -1"):
        planned(DENSE, context=8192, parallel="tp8", sum_pieces=-1)


def test_where_nothing_can_overlap_the_plan_says_so() -> None:
    """Asked for on a CPU, the order of calls changes at most."""
    wishes: dict[str, Any] = {"parallel": "tp2", "halves": 8, "shared_beside": 4, "sum_pieces": 2}
    intent = Intent(model=TINY, context=96, kv_bytes=1 << 26, **wishes)
    plan = describe("cpu").resolve(open_model(TINY), intent).plan
    assert (plan.halves, plan.shared_beside, plan.sum_pieces) == (8, 4, 2)
    for key in ("halves", "shared_beside", "sum_pieces"):
        (told,) = (each for each in plan.decisions if each.key == key)
        assert "nothing overlaps" in told.why
    card = planned(V4, context=8192, parallel="tp8", halves=4096)
    assert not any("nothing overlaps" in each.why for each in card.plan.decisions)


# -- measured gains --------------------------------------------------------------------------------


def said_of(machine: str, model: str = V4, **wishes: Any) -> tuple[object, Origin, list[str]]:
    return said(planned(model, machine, context=8192, **wishes), "shared_beside")


@pytest.mark.parametrize("row", gains.shipped(gains.SHARED), ids=lambda row: row.record)
def test_what_is_shipped_is_what_was_measured(row: gains.Gain) -> None:
    """The worse order of launch counts, every result is equal, and a step is on only where all
    smaller ones gained too."""
    body = json.loads((RECORDS / f"{row.record}.json").read_text())
    found: dict[int, list[Any]] = {}
    for each in body["rows"]:
        _, tokens, arm = re.split(", |: ", each["row"])
        if arm in ("shared first", "routed first"):
            found.setdefault(int(tokens), []).append(each)
            assert each["equal"] and each["n"] >= 35
    assert all(len(orders) == 2 for orders in found.values())
    worse = {tokens: min(each["gain"] for each in found[tokens]) for tokens in sorted(found)}
    assert dict(row.gains) == {tokens: round(gain, 3) for tokens, gain in worse.items()}
    on = [n for n in sorted(found) if min(each["interval"][0] for each in found[n]) > 1]
    assert on == sorted(found)[: len(on)] and row.tokens == on[-1]
    assert body["device"].endswith(row.device.split()[-1])


def test_it_is_on_where_a_gain_was_measured_and_the_plan_names_the_record() -> None:
    found = planned(V4, "1x-h200", context=8192)
    assert found.plan.shared_beside == 32
    assert said(found, "shared_beside") == (32, Origin.RECORD, [])
    (told,) = (each for each in found.plan.decisions if each.key == "shared_beside")
    assert "2026-11-30-h200-overlap" in told.why and "1.024 at 32" in told.why
    assert said_of("2x-h200-nop2p", parallel="2x") == (32, Origin.RECORD, [])  # one beside another
    meeting = planned(V4, "2x-h200-nop2p", context=8192, parallel="tp2")
    assert said(meeting, "shared_beside") == (32, Origin.RECORD, [])
    (told,) = (each for each in meeting.plan.decisions if each.key == "shared_beside")
    assert "2026-11-30-2xh200-overlap-tp2" in told.why and "1.042 at 1" in told.why


@pytest.mark.parametrize(
    ("machine", "wish"),
    [
        ("2x-h200-nop2p", {"parallel": "tp2ep2"}),
        ("2x-h200-nop2p", {"parallel": "tp2", "collectives": "nccl"}),
        ("1x-h200", {"parallel": "tp2", "one_card": True}),
        ("2x-rtx-pro-6000", {"parallel": "single"}),
    ],
)
def test_other_cards_layouts_and_collectives_stay_off(machine: str, wish: dict[str, Any]) -> None:
    assert said_of(machine, **wish) == (0, Origin.SEED, ["unmeasured"])


def test_a_user_s_word_beats_what_was_measured() -> None:
    assert said_of("1x-h200", shared_beside=0)[:2] == (0, Origin.FLAG)
    assert said_of("1x-h200", shared_beside=4)[:2] == (4, Origin.FLAG)


def test_other_families_stay_off() -> None:
    other = "random:deepseek-v3.2?layers=4"  # with a shared expert
    assert said_of("1x-h200", other) == (0, Origin.SEED, ["unmeasured"])
    assert said_of("1x-h200", DENSE) == (0, Origin.DERIVED, ["model", "unmeasured"])


def test_a_gain_does_not_beat_what_stands_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the decision nor in what captured steps are said to hold."""
    for module in (gains, lanes):
        monkeypatch.setattr(module, "gain_of", lambda *asked: gains.shipped(gains.SHARED)[0])
    found = planned.__wrapped__(DENSE, "1x-h200", context=8192)  # never one from before
    assert said(found, "shared_beside")[:2] == (0, Origin.DERIVED)
    arch, layout = found.arch, found.plan.layouts[0]
    facts = describe("1x-h200").facts
    assert gains.rows_beside(Intent(model=DENSE), arch, facts, layout) == 0


CHUNKS = [
    (gains.HALVES, "turns"), (gains.PIECES, f"pieces {PIECES}"), (gains.GATHERS, "beside"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arm", "row"),
    [(arm, row) for what, arm in CHUNKS for row in gains.shipped(what)],
    ids=lambda each: each if isinstance(each, str) else each.record,
)
def test_chunks_are_shipped_as_they_were_measured(arm: str, row: gains.Gain) -> None:
    """From the smallest on from which all larger ones gained too, results equal: of halves in turns
    to those of halves without turns, of pieces to those of whole products."""
    body = json.loads((RECORDS / f"{row.record}.json").read_text())
    turns = {
        int(each["row"].partition(", ")[2].partition(":")[0]): each
        for each in body["rows"]
        if each["row"].endswith(f": {arm}")
    }
    assert all(each["equal"] and each["n"] >= 35 for each in turns.values())
    assert dict(row.gains) == {n: round(turns[n]["gain"], 3) for n in sorted(turns)}
    on = [n for n in sorted(turns) if turns[n]["interval"][0] > 1]
    assert on == sorted(turns)[-len(on) :] and row.tokens == on[0]
    assert f"--parallel {row.ranks} " in body["command"] + " "
    assert body["device"].endswith(row.device.split()[-1])


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> gains.Gain:
    """As if halves of `tp2` had been measured."""
    row = gains.Gain(
        family="deepseek_v4", capability=(9, 0), ranks="tp2", device="two H200",
        gains={4096: 0.98, 8192: 1.25}, tokens=8192, record="some-record",
    )  # fmt: skip
    shipped = gains.shipped
    monkeypatch.setattr(
        gains, "shipped", lambda what: (row,) if what == gains.HALVES else shipped(what)
    )
    return row


def test_pieces_are_of_one_layout_and_leave_what_takes_turns(
    halved: gains.Gain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a record, and below the chunks whose halves take turns."""
    least = replace(halved, gains={4096: 1.1}, tokens=4096, record="of pieces")
    rows = {gains.HALVES: (halved,), gains.PIECES: (least,)}
    monkeypatch.setattr(gains, "shipped", lambda what: rows.get(what, ()))
    wish: dict[str, Any] = {"context": 8192, "parallel": "tp2", "chunk_tokens": 8192}
    found = planned.__wrapped__(V4, "2x-h200-nop2p", **wish)
    assert (found.plan.halves, found.plan.sum_pieces) == (8192, 4096)
    (told,) = (each for each in found.plan.decisions if each.key == "sum_pieces")
    assert told.origin is Origin.RECORD and "of pieces" in told.why
    turning = planned.__wrapped__(V4, "2x-h200-nop2p", **wish, halves=4096)
    assert said(turning, "sum_pieces") == (0, Origin.DERIVED, ["halves"])
    other = planned.__wrapped__(V4, "2x-h200-nop2p", context=8192, parallel="ep2")
    assert said(other, "sum_pieces")[:2] == (0, Origin.DERIVED)
    asked = planned.__wrapped__(V4, "2x-h200-nop2p", **wish, collectives="nccl")
    assert said(asked, "sum_pieces")[:2] == (0, Origin.SEED)


def test_pieces_are_on_where_halves_are_switched_off() -> None:
    wish: dict[str, Any] = {"context": 8192, "parallel": "tp2", "chunk_tokens": 8192}
    found = planned(V4, "2x-h200-nop2p", **wish, halves=0)
    assert said(found, "sum_pieces") == (8192, Origin.RECORD, [])


def said_of_halves(machine: str, model: str = V4, **wishes: Any) -> tuple[object, Origin]:
    found = planned.__wrapped__(model, machine, context=8192, chunk_tokens=8192, **wishes)
    return said(found, "halves")[:2]


def test_chunks_take_turns_from_where_a_gain_was_measured(halved: gains.Gain) -> None:
    wish: dict[str, Any] = {"context": 8192, "parallel": "tp2", "chunk_tokens": 8192}
    found = planned.__wrapped__(V4, "2x-h200-nop2p", **wish)
    assert found.plan.halves == halved.tokens
    (told,) = (each for each in found.plan.decisions if each.key == "halves")
    assert (
        told.origin is Origin.RECORD and "some-record" in told.why and "1.250 at 8,192" in told.why
    )
    assert said_of_halves("2x-h200-nop2p", parallel="tp2", collectives="host")[0] == 8192


@pytest.mark.parametrize(
    ("machine", "model", "wish"),
    [
        ("2x-h200-nop2p", V4, {"parallel": "ep2"}),
        ("2x-h200-nop2p", V4, {"parallel": "tp2", "collectives": "nccl"}),
        ("2x-rtx-pro-6000", V4, {"parallel": "tp2"}),
        ("2x-h200-nop2p", DENSE, {"parallel": "tp2"}),
        ("2x-h200-nop2p", V4, {"parallel": "tp2", "halves": 0}),
    ],
)
def test_other_layouts_links_and_models_take_no_turns(
    halved: gains.Gain, machine: str, model: str, wish: dict[str, Any]
) -> None:
    assert said_of_halves(machine, model, **wish)[0] == 0


TURNED = {
    ("tp2", 4096): 0.822, ("tp2", 8192): 1.256, ("ep2", 2048): 0.504, ("ep2", 8192): 1.158,
    ("cp2/tp2", 8192): 0.651, ("cp2/tp2", 16384): 1.086,
}  # fmt: skip
"""Chunks over two H200, whole over halves in turns (records 2026-11-30-2xh200-overlap-tp2-4096,
-overlap-tp2, -ranks-third, -turns-ep2, -overlap-cp2-tp2): those that lost waited for their host."""


@pytest.mark.parametrize(("at", "gain"), TURNED.items(), ids=str)
def test_halves_that_are_launched_for_longer_than_the_whole_takes_are_told(
    at: tuple[str, int], gain: float
) -> None:
    layout, tokens = at
    model = "random:deepseek-v4-flash?layers=12"
    intent = Intent(model=model, parallel=layout, context=16384, concurrency=64, halves=tokens)
    found = describe("2x-h200-nop2p").resolve(open_model(model), intent)
    assert said(found, "halves") == (tokens, Origin.FLAG, ["launches"] if gain < 1 else [])
    if gain < 1:
        (told,) = (each for each in found.plan.decisions if each.key == "halves")
        (reason,) = told.losers[0].reasons
        assert told.losers[0].value == "off" and reason.data["tokens"] == tokens
        assert reason.data["launch_s"] > reason.data["whole_s"] > 0
        assert (layout, reason.data["from"]) in {
            ("tp2", 8192), ("ep2", 8192), ("cp2/tp2", 16384),
        }  # fmt: skip


@pytest.mark.parametrize(("most", "end"), [(4096, None), (8192, 8192)])
def test_where_halves_are_never_launched_in_time_no_length_is_named(
    most: int, end: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it is looked: `tp2` is in time from 8,192 tokens on."""
    monkeypatch.setattr(lanes, "MOST_TOKENS", most)
    model = "random:deepseek-v4-flash?layers=12"
    intent = Intent(model=model, parallel="tp2", context=16384, concurrency=64, halves=4096)
    found = describe("2x-h200-nop2p").resolve(open_model(model), intent)
    (told,) = (each for each in found.plan.decisions if each.key == "halves")
    (reason,) = told.losers[0].reasons
    assert reason.data["from"] == end
    text = "at 4,096 they still are (" if end is None else "from 8,192 on they are not ("
    assert text in reason.message


def test_halves_are_judged_at_the_shortest_chunk_that_is_cut() -> None:
    """What is captured stays whole; on other machines, without a rate, nothing is said."""
    found = planned(V4, "2x-h200-nop2p", context=8192, parallel="tp2", halves=64)
    (told,) = (each for each in found.plan.decisions if each.key == "halves")
    captured = max(each.tokens for each in found.plan.graphs if each.phase == "chunk")
    assert told.losers[0].reasons[0].data["tokens"] == captured + 1
    for chunk, codes in ((8192, ["launches"]), (4096, [])):  # no chunk is that long
        wish = Intent(model=V4, context=8192, parallel="cp2/tp2", halves=8192, chunk_tokens=chunk)
        short = describe("2x-h200-nop2p").resolve(open_model(V4), wish)
        assert said(short, "halves") == (8192, Origin.FLAG, codes)
    unknown = describe("8x-rtx-pro-6000d").resolve(
        open_model(V4), Intent(model=V4, context=8192, parallel="tp8", halves=64)
    )
    assert said(unknown, "halves") == (64, Origin.FLAG, [])


def test_a_gain_of_turns_does_not_beat_what_stands_against_them(
    halved: gains.Gain, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(halved, ranks="tp2cs2")
    monkeypatch.setattr(gains, "shipped", lambda what: (row,))
    assert said_of_halves("2x-h200-nop2p", parallel="tp2cs2") == (0, Origin.DERIVED)
    found = planned.__wrapped__(V4, "2x-h200-nop2p", context=8192, parallel="tp2cs2")
    assert found.chosen.cost.prefill(8192, 8192).gain == 1.0  # nor in prices


def test_turns_where_cards_write_into_each_other_stay_off(
    halved: gains.Gain, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = no_peer(2)
    monkeypatch.setattr(gains, "from_facts", lambda facts: replace(tree, peer=True))
    assert said_of_halves("2x-h200-nop2p", parallel="tp2")[0] == 0
    monkeypatch.setattr(gains, "from_facts", lambda facts: replace(tree, peer=None))
    assert said_of_halves("2x-h200-nop2p", parallel="tp2")[0] == 0


def test_standing_bytes_belong_to_steps_with_or_without_a_second_stream() -> None:
    """Its memory and its libraries' workspaces stand beside weights and cache too."""
    found = planned(V4, "1x-h200", context=8192)
    held = found.chosen.held
    assert held is not None
    key = graphs.key(held.wanted, 8192, found.plan.shared_beside)
    needs = Needs(peaks=(Peak(512, 8191, 1 << 30),), ops="", standing_bytes=12345, captured=key)

    def standing(**wishes: Any) -> bool:
        intent = Intent(model=V4, context=8192, concurrency=8, **wishes)
        there, facts = describe("1x-h200", intent), known_rate("1x-h200")
        plan = resolve(
            intent, open_model(V4).facts, facts, there.registry, there.policy(intent),
            needs=lambda key: needs,
        ).plan  # fmt: skip
        return any(row.kind == "graphs" and row.bytes == 12345 for row in plan.ledger)

    assert standing() and standing(shared_beside=32)
    assert not standing(shared_beside=0) and not standing(shared_beside=8)
