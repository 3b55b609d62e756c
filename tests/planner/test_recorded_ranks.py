"""What ranks send, and recorded steps of two cards beside what is expected of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.comm import model as links
from metainfer.comm.topology import Topology
from metainfer.core.intent import Intent
from metainfer.core.plan import LayoutPlan
from metainfer.engine.elsewhere import describe
from metainfer.planner.calibration import Sample
from metainfer.planner.exchange import AROUND_US, Exchange, Sent
from metainfer.planner.opening import open_model
from metainfer.planner.steps import StepCost

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import ranks_predicted as recorded

V4, DENSE = "random:deepseek-v4-flash?layers=12", "random:qwen3-8b"


def cost_of(model: str, layout: str = "tp2") -> tuple[StepCost, Topology]:
    intent = Intent(model=model, parallel=layout, context=4096, concurrency=64)
    cost = describe("2x-h200-nop2p").resolve(open_model(model), intent).chosen.cost
    assert cost is not None and cost.tree is not None
    return cost, cost.tree


@pytest.mark.parametrize(("model", "width"), [(V4, 4), (DENSE, 2)])
def test_logits_are_sent_as_wide_as_the_family_has_them(model: str, width: int) -> None:
    cost, tree = cost_of(model)
    exchange, row = Exchange(cost.work, tree), cost.work.vocab * width

    def gathered(rows: int) -> float:
        return links.direct(tree, rows * row, through_host=True)

    more = exchange.seconds(Sent(8, 64)) - exchange.seconds(Sent(8, 1))
    assert more * 1e6 == pytest.approx(gathered(64) - gathered(1))


def test_a_step_that_is_replayed_has_no_copies() -> None:
    """Sums of 64 MB: by kernels in a graph, by copy engines in an eager chunk."""
    cost, tree = cost_of(V4)
    exchange, size = Exchange(cost.work, tree), 8192 * 4096 * 2
    replayed, eager = Sent(8192, 1, new=8192), Sent(8192, 1, new=8192, eager=True)
    slower = links.host_one_shot(tree, size) - links.host_copy(tree, size)
    sums = 2 * cost.work.layers + 1
    apart = (exchange.seconds(replayed) - exchange.seconds(eager)) * 1e6
    assert slower > 0 and apart == pytest.approx(sums * slower)


def test_scattered_sums_send_a_part_for_each_rank() -> None:
    """Four ranks by kernels through host memory: three parts down and three up, where a gather is
    one down and three up."""
    cost, tree = cost_of(V4, "ep2")
    work = replace(cost.work, layout=LayoutPlan(name="ep4", data=4, expert=4), layers=1)
    four, size = links_of(tree, 4), 4 * 4096 * 2
    gathered = links.direct(four, size + 4 * 48, through_host=True)
    sums = links.direct(four, size, through_host=True, parted=True)
    rate = min(four.kernel_bytes_s or 0.0, four.dram_bytes_s / 4)
    assert sums - links.direct(four, 0, through_host=True) == pytest.approx(1.5 * size / rate * 1e6)
    assert Exchange(work, four).seconds(Sent(1, 1)) * 1e6 == pytest.approx(
        gathered + sums + 2 * AROUND_US
    )


def links_of(tree: Topology, ranks: int) -> Topology:
    """As many cards like those of `tree`."""
    return replace(tree, switches=("",) * ranks, sockets=(0,) * ranks)


def test_rows_to_shared_experts_come_with_their_routes() -> None:
    """Number and weight of a token's experts: with few rows, else in a message with the scales."""
    cost, tree = cost_of(V4, "ep2")
    assert cost.work.rounded_from

    def seconds(tokens: int) -> float:
        return Exchange(cost.work, tree).seconds(Sent(tokens, 1)) * 1e6 / cost.work.layers

    def sent(*sizes: int) -> float:
        return sum(AROUND_US + links.direct(tree, size, through_host=True) for size in sizes)

    row, routes, scales = 2 * 4096, 2 * 6 * 8, 2 * 32 * 4
    assert seconds(1) == pytest.approx(sent(2 * row + routes, 2 * row))
    assert seconds(64) == pytest.approx(sent(64 * row, 64 * (routes + scales), 128 * row))


# -- recorded runs ---------------------------------------------------------------------------------

WITHIN = 0.15
OLD_MESSAGES = "recorded when numbers and weights of experts were messages of their own"
MISSED = {("two cards, ep2, host, halves", "decode, batch 1,"): OLD_MESSAGES}
"""Case and how a row begins -> why it may lie further off than `WITHIN`."""


@pytest.mark.parametrize("case", recorded.judged())
def test_two_card_rows_within_15_percent_from_other_cases(case: str) -> None:
    """Each from one card's rows and those of other layouts or collectives; no row prices itself.

    Where halves of a chunk take turns, between what pairs of such chunks gained and nothing.
    """
    about = recorded.TIMED[case]
    price = recorded.price(about.layout, about.collectives)
    for row, sample in recorded.two_cards(case):
        if any(case == at and row.startswith(begin) for at, begin in MISSED):
            continue
        least, taken = price(sample.phase, sample.amounts), sample.seconds
        most = max(least, price(sample.phase, replace(sample.amounts, gain=1.0)))
        assert most == least or about.halves is not None
        assert least / (1 + WITHIN) <= taken <= most / (1 - WITHIN), (row, least, taken, most)


def test_no_case_prices_itself_nor_its_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = recorded.two_cards, list[str]()

    def two_cards(case: str) -> Iterator[tuple[str, Sample]]:
        asked.append(case)
        yield from read(case)

    monkeypatch.setattr(recorded, "two_cards", two_cards)
    recorded.price.__wrapped__("ep2", "host")
    assert "two cards, tp2, nccl without peers" in asked and "two cards, cp2/tp2, host" in asked
    assert not any("ep2, host" in case or "halves" in case for case in asked)
    assert not any("one card" in case or "ipc" in case for case in asked)
