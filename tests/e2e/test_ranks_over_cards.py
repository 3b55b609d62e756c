"""Layouts over cards, as they are planned and started; what runs on cards is in `benchmarks`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from metainfer.comm import card_ranks
from metainfer.comm.host_ranks import HostRanks
from metainfer.comm.peers import Place
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.engine import rank
from metainfer.engine.elsewhere import describe
from metainfer.planner.layouts import NOT_BUILT
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved

LLAMA = "random:tiny-llama"


def planned(machine: str = "2x-h200-nop2p", **wish: Any) -> Resolved:
    intent = Intent(model=LLAMA, context=256, **wish)
    return describe(machine, intent).resolve(open_model(LLAMA), intent)


def why(found: Resolved, key: str) -> tuple[object, str]:
    (decision,) = [each for each in found.plan.decisions if each.key == key]
    return decision.value, decision.why


def test_a_layout_over_cards_runs_when_it_is_asked_for() -> None:
    asked = planned(parallel="tp2")
    assert asked.refusal() is None
    assert why(asked, "collectives")[0] == "auto"
    assert why(planned(parallel="tp2", collectives="host"), "collectives")[0] == "host"
    assert [each.layout.name for each in asked.layouts if each.built] == ["single", "tp2"]
    alone = planned()
    assert alone.plan.layouts[0].name == "single" and NOT_BUILT in why(alone, "layouts")[1]


def test_a_way_between_cards_is_an_error_where_nothing_goes_between_cards() -> None:
    (asked,) = [
        each
        for each in planned(parallel="tp2", collectives="host").plan.decisions
        if each.key == "collectives"
    ]
    assert asked.origin is Origin.FLAG
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("2x-h200-nop2p", {}),
        ("2x-h200-nop2p", {"parallel": "2x"}),
        ("cpu", {"parallel": "tp2", "kv_bytes": 1 << 24}),
    )
    for machine, wish in cases:
        with pytest.raises(UsageError, match="--collectives nccl carries messages between cards"):
            planned(machine, collectives="nccl", **wish)
        planned(machine, collectives="auto", **wish)


def test_all_ranks_on_one_card_share_its_memory() -> None:
    found = planned("1x-h200", parallel="tp2", one_card=True)
    assert found.plan.layouts[0].name == "tp2" and found.refusal() is None
    whole = describe("1x-h200").facts.device.memory_bytes
    assert whole is not None and found.device_bytes == whole // 2
    assert sum(row.bytes for row in found.plan.ledger if row.memory == "device") == whole // 2
    assert "all ranks on one card" in why(found, "collectives")[1]
    for wish, cause in (
        ({"one_card": True}, "no such layout is asked for"),
        ({"one_card": True, "parallel": "tp2", "machine": "cpu"}, "is for cards"),
    ):
        with pytest.raises(UsageError, match=cause):
            planned(**{"machine": "1x-h200", **wish})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one_card", "index", "peer"), [(False, 1, False), (True, 0, True)], ids=["cards", "one card"]
)
def test_a_rank_takes_the_card_of_its_number(
    one_card: bool, index: int, peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    intent = Intent(model=LLAMA, parallel="tp2", one_card=one_card, collectives="host")
    own = rank.own_device(torch.device("cuda"), 1, intent)
    assert own == torch.device("cuda", index) and taken == [own]
    monkeypatch.setattr(
        card_ranks, "CardRanks", lambda *given, **options: SimpleNamespace(given=given, **options)
    )
    machine = "1x-h200" if one_card else "2x-h200-nop2p"
    found = planned(machine, parallel="tp2", one_card=one_card, chunk_tokens=512)
    place = Place(found.plan.layouts[0], 1)
    made: Any = rank.links_of("t", place, own, intent, describe(machine).facts, found)
    assert made.given[2].world == 2 and made.given[2].peer is peer and made.sharing is one_card
    assert made.dtype == "bfloat16" and made.method == "host"
    costs = found.arch.costs()
    assert costs is not None and made.most_bytes == 512 * costs.hidden * 2


def test_on_a_host_ranks_meet_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []

    def note(self: HostRanks, *given: object) -> None:
        made.append(given)

    monkeypatch.setattr(HostRanks, "__init__", note)
    cpu, place = torch.device("cpu"), Place(planned(parallel="tp2").plan.layouts[0], 0)
    intent = Intent(model=LLAMA, parallel="tp2")
    assert rank.own_device(cpu, 1, intent) == cpu
    rank.links_of("t", place, cpu, intent, describe("cpu").facts, planned(parallel="tp2"))
    assert made == [("t", place, None)]
