"""One rank of several on one device, as it is planned: whose rank, on which links, and refusals."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import DecisionLedger
from metainfer.core.plan import StepGraph
from metainfer.engine.elsewhere import describe
from metainfer.engine.machine import Machine, open_machine
from metainfer.planner import overlap
from metainfer.planner.emulation import emulation_of
from metainfer.planner.opening import OpenedModel, open_model
from metainfer.planner.resolve import Resolved

V4, LLAMA = "random:tiny-deepseek-v4", "random:tiny-llama"
NAMED = "8x-rtx-pro-6000d"


@pytest.fixture(scope="module")
def machine() -> Machine:
    return open_machine("cpu")


@pytest.fixture(scope="module")
def models() -> dict[str, OpenedModel]:
    return {name: open_model(name) for name in (V4, LLAMA)}


def planned(
    machine: Machine, models: dict[str, OpenedModel], model: str = V4, **wish: object
) -> Resolved:
    asked = {"rank_of": 4, "of_machine": NAMED, "context": 256, **wish}
    return machine.resolve(models[model], Intent(model=model, platform="cpu", **asked))  # type: ignore[arg-type]


def test_the_plan_is_of_one_domain_and_says_whose_rank_it_is(
    machine: Machine, models: dict[str, OpenedModel]
) -> None:
    found = planned(machine, models, parallel="tp2ep4", collectives="nccl")
    plan = found.plan
    assert plan.layouts[0].name == "tp2ep4" and plan.layouts[0].data == 2
    assert plan.kv_domains == 1 and found.refusal() is None
    said = {"rank": 0, "ranks": 4, "machine": NAMED, "collectives": "nccl"}
    assert dict(plan.emulated) == said
    decided = {decision.key: decision for decision in plan.decisions}
    assert decided["emulated"].value == said and "mean nothing" in decided["emulated"].why
    assert "peer access is unknown" in decided["emulated"].why  # what the tree assumes is told
    assert decided["collectives"].value == "emulated"


def test_only_layouts_of_so_many_ranks_are_judged(
    machine: Machine, models: dict[str, OpenedModel]
) -> None:
    found = planned(machine, models)
    assert {each.layout.ranks for each in found.layouts} == {4}
    with pytest.raises(UsageError, match="'tp2' is none of 4 ranks") as caught:
        planned(machine, models, parallel="tp2")
    assert "ep4" in caught.value.remedy and "single" not in caught.value.remedy
    for name in ("cp4/tp4", "tp4cs4"):  # of four ranks they are, alone they are not
        with pytest.raises(UsageError, match=f"'{name}' deals rows or pages to peers"):
            planned(machine, models, parallel=name)


def test_a_plan_of_its_own_never_one_that_answers(
    machine: Machine, models: dict[str, OpenedModel]
) -> None:
    real = machine.resolve(
        models[LLAMA], Intent(model=LLAMA, platform="cpu", parallel="tp2", context=256)
    )
    emulated = planned(machine, models, LLAMA, rank_of=2, parallel="tp2")
    assert not real.plan.emulated
    assert not any(path.startswith("emulated") for path in real.plan.values())
    assert real.plan.fingerprint != emulated.plan.fingerprint


def test_collectives_have_the_price_of_the_named_machine(
    machine: Machine, models: dict[str, OpenedModel]
) -> None:
    slow, fast = (
        planned(machine, models, LLAMA, rank_of=2, parallel="tp2", of_machine=name).chosen.cost
        for name in ("8x-4090", "8x-5090")
    )
    real = machine.resolve(
        models[LLAMA], Intent(model=LLAMA, platform="cpu", parallel="tp2", context=256)
    ).chosen.cost
    assert slow is not None and fast is not None and real is not None
    sent = [cost.decode(64, 100).sent for cost in (real, fast, slow)]
    assert sent[0] == 0.0 < sent[1] < sent[2]  # processes of a host have no bus


def test_a_rank_alone_has_the_whole_host(machine: Machine, models: dict[str, OpenedModel]) -> None:
    """Where ranks are processes of one host they share its memory; here there is one."""
    host = dataclasses.replace(machine.facts.host, memory_bytes=32 << 20)
    small = dataclasses.replace(machine, facts=dataclasses.replace(machine.facts, host=host))
    wish = {"parallel": "2xtp2", "concurrency": 256, "context": 256}
    alone = planned(small, models, LLAMA, **wish)
    together = small.resolve(
        models[LLAMA],
        Intent(model=LLAMA, platform="cpu", parallel="2xtp2", context=256),
    )
    assert alone.chosen.held is not None and together.chosen.held is not None
    assert alone.chosen.held.budget_bytes > 2 * together.chosen.held.budget_bytes


def test_a_card_here_holds_no_more_than_a_card_there() -> None:
    emulation = emulation_of(Intent(model="m", rank_of=8, of_machine=NAMED))
    assert emulation is not None
    facts = describe("1x-h200").facts
    assert facts.device.memory_bytes is not None
    there = describe(NAMED).facts.device.memory_bytes
    assert there is not None
    held = emulation.on(facts).device.memory_bytes
    assert held == there < facts.device.memory_bytes
    little = dataclasses.replace(
        facts, devices=(dataclasses.replace(facts.device, memory_bytes=1 << 30),)
    )
    assert emulation.on(little).device.memory_bytes == 1 << 30


@pytest.mark.parametrize(
    ("wish", "cause", "remedy"),
    [
        ({"rank_of": 8}, "does not say of which machine", "--machine NAME"),
        ({"of_machine": NAMED}, "whose rank is emulated, and none is", "--rank-of N"),
        ({"rank_of": 9, "of_machine": NAMED}, "which has 8 cards", "Pass 2 to 8"),
        ({"rank_of": 1, "of_machine": NAMED}, "no number of ranks", "Pass 2 to 8"),
        ({"rank_of": 2, "of_machine": "1x-h200"}, "which has 1 cards", "another machine"),
        ({"rank_of": 2, "of_machine": "cpu"}, "no devices that a bus could link", "--machine"),
        ({"rank_of": 2, "of_machine": "no-such"}, "no-such", ""),
    ],
)
def test_what_cannot_be_emulated_is_refused(
    wish: dict[str, object], cause: str, remedy: str
) -> None:
    from metainfer.core.errors import UserError

    with pytest.raises(UserError, match=cause) as caught:
        emulation_of(Intent(model="m", **wish))  # type: ignore[arg-type]
    assert remedy in caught.value.remedy


def test_a_rank_alone_launches_steps_ahead_as_ranks_do() -> None:
    """What its peers take is waited for on the device; the host goes on."""
    emulation = emulation_of(Intent(model="m", rank_of=8, of_machine=NAMED))
    for emulated in (emulation, None):
        cards: Any = SimpleNamespace(
            draft=SimpleNamespace(method="off"), emulated=emulated, intent=Intent(model="m")
        )
        graph = StepGraph(phase="decode", tokens=8, runs=8)
        assert overlap.decide((graph,), cards, DecisionLedger())
        assert not overlap.decide((), cards, DecisionLedger())


def test_a_machine_elsewhere_runs_no_rank(models: dict[str, OpenedModel]) -> None:
    with pytest.raises(UsageError, match="is not here"):
        describe(NAMED).resolve(models[LLAMA], Intent(model=LLAMA, rank_of=8))
