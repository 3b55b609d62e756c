"""What domains send to experts that they share, as the plan says it: rounded where kernels take it
so, as it is elsewhere, with the reason of each phase."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_lanes import said
from test_spread_contexts import cost, planned

from metainfer.comm.model import copied_gather, copied_scatter, direct
from metainfer.comm.topology import Topology, from_facts, no_peer
from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.engine.elsewhere import describe
from metainfer.kernels.choice import Selection
from metainfer.planner.dispatch import LEAST, least_rows, rounded_from
from metainfer.planner.exchange import AROUND_US
from metainfer.planner.steps import StepCost

NO_PEERS = "2x-h200-nop2p"
V4 = "random:deepseek-v4-flash?layers=4"


def test_experts_that_round_first_are_sent_rounded_rows() -> None:
    found = planned(V4, NO_PEERS, context=8192, parallel="ep2")
    assert found.plan.rounded_from == LEAST
    assert said(found, "rounded_from") == (LEAST, Origin.SEED, [])
    asked = Intent(model=V4)
    assert least_rows(asked, found.selection, Phase.CHUNK) == LEAST
    whole, ledger = found.selection, DecisionLedger()
    choices = tuple(
        replace(each, impl=replace(each.impl, rounds=""))
        if each.request.op == "moe_experts" and each.request.phase is Phase.DECODE
        else each
        for each in whole.bundle.choices
    )
    mixed: Selection = replace(whole, bundle=replace(whole.bundle, choices=choices))
    assert rounded_from(found.plan.layouts[0], asked, mixed, ledger) == LEAST
    assert [loser.value for loser in ledger["rounded_from"].losers] == ["rounded@decode"]
    assert least_rows(asked, mixed, Phase.CHUNK) == LEAST
    assert least_rows(asked, mixed, Phase.DECODE) == 0
    for name, layout, value in (
        ("tp2", LayoutPlan(name="tp2", tensor=2), 0),
        ("tp2ep2", LayoutPlan(name="tp2ep2", tensor=2, expert=2), 0),
        ("tp2ep4", LayoutPlan(name="tp2ep4", tensor=2, data=2, expert=4), LEAST),
        ("cp2/tp2ep2", LayoutPlan(name="cp2/tp2ep2", tensor=2, expert=2, prefill=2), LEAST),
    ):
        assert rounded_from(layout, asked, whole, DecisionLedger()) == value, name


@pytest.mark.parametrize("least", [0, 1, 5000])
def test_a_user_s_bound_is_planned_and_priced(least: int) -> None:
    found = planned(V4, NO_PEERS, context=8192, parallel="ep2", rounded_from=least)
    assert found.plan.rounded_from == least
    assert said(found, "rounded_from") == (least, Origin.FLAG, [])
    (told,) = (each for each in found.plan.decisions if each.key == "rounded_from")
    assert told.why.startswith("asked for" if least else "switched off")
    priced, usual = (
        cost("ep2", found),
        cost("ep2", planned(V4, NO_PEERS, context=8192, parallel="ep2")),
    )
    never = StepCost(replace(usual.work, rounded_from=0), priced.tree)
    always = StepCost(replace(usual.work, rounded_from=1), priced.tree)
    for rows in (32, 4096, 8192):
        like = always if 0 < least <= rows else never
        assert priced.prefill(rows, rows).sent == like.prefill(rows, rows).sent
    assert never.prefill(4096, 4096).sent > always.prefill(4096, 4096).sent


@pytest.mark.parametrize(
    ("machine", "layout", "reason"),
    [
        (NO_PEERS, LayoutPlan(name="tp2", tensor=2), "no rank sends its rows to experts"),
        ("8x-a800-pcie", None, "moe_experts/triton-bf16 takes rows as they are"),
    ],
)
def test_a_bound_that_nothing_meets_is_an_error(
    machine: str, layout: LayoutPlan | None, reason: str
) -> None:
    parallel = "ep2" if machine == NO_PEERS else "dp8ep8"
    found, ledger = planned(V4, machine, context=8192, parallel=parallel), DecisionLedger()

    def decide(least: int) -> int:
        wish = Intent(model=V4, rounded_from=least)
        return rounded_from(layout or found.plan.layouts[0], wish, found.selection, ledger)

    with pytest.raises(RefusedError, match=reason):
        decide(64)
    with pytest.raises(UsageError, match="--rounded-from is -1"):
        decide(-1)
    assert decide(0) == 0 and ledger["rounded_from"].origin is Origin.FLAG


def test_rows_are_priced_as_they_are_sent() -> None:
    """Four layers of 4,096 rows a domain there and back, long ones by copy engines, and beside them
    a message of numbers, weights and scales; few rows are one message, as they are."""
    found = planned(V4, NO_PEERS, context=8192, parallel="ep2")
    tree = from_facts(describe(NO_PEERS).facts).group(2, 2)
    priced = cost("ep2", found)
    many = 2 * 4096 * 4096

    def beside(ranks: int, scales: int, tree: Topology = tree) -> float:
        size = ranks * 4096 * (6 * 8 + scales * 4)
        return min(direct(tree, size, through_host=True), copied_gather(tree, size))

    there, back = copied_gather(tree, many), copied_scatter(tree, 2 * many)
    sent = priced.prefill(4096, 4096).sent * 1e6
    assert sent == pytest.approx(4 * (there + back + beside(2, 32) + 3 * AROUND_US))
    few, routes = 2 * 2 * 4096 * 2, 2 * 2 * 6 * 8
    assert priced.prefill(2, 2).sent * 1e6 == pytest.approx(
        4 * sum(AROUND_US + direct(tree, size, through_host=True) for size in (few + routes, few))
    )
    as_they_are = StepCost(replace(priced.work, rounded_from=0), tree)
    assert as_they_are.prefill(4096, 4096).sent * 1e6 == pytest.approx(
        4 * (copied_gather(tree, 2 * many) + back + beside(2, 0) + 3 * AROUND_US)
    )
    four = replace(no_peer(4), duplex_bytes_s=20e9, kernel_bytes_s=9e9)  # each way has its price
    work = replace(priced.work, layout=LayoutPlan(name="ep4", data=4, expert=4))
    there, back = copied_gather(four, 2 * many), copied_scatter(four, 4 * many)
    sent = StepCost(work, four).prefill(4096, 4096).sent * 1e6
    assert sent == pytest.approx(4 * (there + back + beside(4, 32, four) + 3 * AROUND_US))


def test_kernels_that_take_rows_as_they_are_say_so_by_phase() -> None:
    """Cards without e4m3 multiply in bfloat16."""
    found = planned(V4, "8x-a800-pcie", context=8192, parallel="dp8ep8")
    phases = {key.partition("@")[2] for key in found.plan.ops if key.startswith("moe_experts@")}
    assert said(found, "rounded_from") == (0, Origin.DERIVED, ["rows"] * len(phases))
    (told,) = (each for each in found.plan.decisions if each.key == "rounded_from")
    assert {loser.value for loser in told.losers} == {f"rounded@{phase}" for phase in phases}
    assert "moe_experts/triton-bf16 takes rows as they are" in told.losers[0].reasons[0].message
