"""One rank alone: what stands in for its peers, how long it waits, and at whose price."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_of

from metainfer.comm import model
from metainfer.comm.backends.emulated import (
    EmulatedComm,
    Form,
    HostWait,
    Price,
    StandIn,
    Waited,
)
from metainfer.comm.emulated_ranks import EmulatedRanks, traffic
from metainfer.comm.model import KIB
from metainfer.comm.peers import Place
from metainfer.comm.plan import CommPlan, Offer, choose
from metainfer.comm.request import Op, Precision, Request, shard
from metainfer.comm.topology import no_peer, one_switch
from metainfer.core.plan import LayoutPlan


class Clock:
    """Time that passes only when somebody sleeps or reads it."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick, self.slept = 100.0, tick, list[float]()

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class NoWait:
    """Fills and counts."""

    def __init__(self) -> None:
        self.prices: list[Price] = []

    def carry(self, call: StandIn, price: Price) -> None:
        call.fill()
        self.prices.append(price)

    def seen(self) -> Waited:
        return Waited(len(self.prices), sum(price.us for price in self.prices))


NOTHING = StandIn(Form.STAYS, torch.zeros(1), torch.zeros(1))


def alone(experts: int = 0) -> EmulatedComm:
    return EmulatedComm(NoWait(), lambda plan: Price(1.0), experts)


def run(
    op: Op,
    given: torch.Tensor,
    world: int,
    out: torch.Tensor | None = None,
    experts: int = 0,
    numbers: int = 0,
) -> torch.Tensor:
    count = given.numel() * (world if op is Op.ALL_GATHER else 1)
    dtype = str(given.dtype).removeprefix("torch.")
    request = Request(op=op, count=count, dtype=dtype, world=world)
    method = "one_shot" if op is Op.ALL_REDUCE else "direct"
    return alone(experts).run(plan_of(request, method), given, out, numbers=numbers)


def test_time_passes_up_to_the_prediction_and_no_further() -> None:
    clock = Clock(tick=1e-6)
    wait = HostWait(clock, clock.sleep)
    begin = clock.now
    wait.carry(NOTHING, Price(5000.0))
    assert 5000.0 <= (clock.now - begin) * 1e6 < 5010.0
    assert sum(clock.slept) > 0.004  # most of it asleep
    seen = wait.seen()
    assert seen.calls == 1 and seen.late == 0 and 5000.0 <= seen.us < 5010.0


def test_what_takes_longer_than_predicted_is_late_and_by_how_much_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    wait = HostWait(clock, clock.sleep)
    slow = torch.zeros(1)
    monkeypatch.setattr(StandIn, "fill", lambda call: clock.sleep(0.030))
    wait.carry(StandIn(Form.STAYS, slow, slow), Price(10_000.0))
    seen = wait.seen()
    assert clock.slept == [0.030] and seen.calls == seen.late == 1
    assert seen.us == pytest.approx(30_000.0) and seen.late_us == pytest.approx(20_000.0)
    assert seen - seen == Waited() and (seen + seen).late == 2


@given(
    world=st.sampled_from([2, 4, 8]),
    tokens=st.integers(0, 5),
    width=st.integers(1, 37),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
@settings(max_examples=40, deadline=None)
def test_peers_bring_this_rank_s_rows_turned(
    world: int, tokens: int, width: int, kind: torch.dtype
) -> None:
    x = torch.randn(tokens, width).to(kind)
    out = torch.full((world * tokens, width), float("nan"), dtype=kind)
    parts = run(Op.ALL_GATHER, x, world, out).view(world, tokens, width)
    for peer in range(world):
        turned = torch.roll(x, -(peer * (width // world)), dims=1)
        assert torch.equal(parts[peer], turned)


def test_a_flat_message_is_one_row() -> None:
    found = run(Op.ALL_GATHER, torch.arange(6.0), 2, torch.full((12,), float("nan")))
    assert found.tolist() == [0.0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1, 2]


@given(
    world=st.sampled_from([2, 4, 8]), share=st.integers(1, 8), tokens=st.integers(0, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_this_rank_s_experts_get_just_the_mean_load(
    world: int, share: int, tokens: int, seed: int
) -> None:
    experts, top = world * share, min(4, world * share)
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=drawn)[:top] for _ in range(tokens)] or
                      [torch.zeros(0, dtype=torch.int64)]).view(tokens, top)  # fmt: skip
    found = run(Op.ALL_GATHER, ids.int(), world, experts=experts, numbers=top)
    parts = found.view(world, tokens, top)
    assert torch.equal(parts[0], ids.int())
    assert bool(((parts >= 0) & (parts < experts)).all())
    assert int((parts < share).sum()) == tokens * top  # of world * tokens * top over world
    for row in parts.reshape(-1, top).tolist():
        assert len(set(row)) == top
    words = run(Op.ALL_GATHER, ids, world, experts=experts)  # tokens, say: nobody's experts
    assert torch.equal(words.view(world, tokens, top), ids.expand(world, tokens, top))


@given(world=st.sampled_from([2, 4]), tokens=st.integers(0, 4), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_only_numbers_of_a_message_move_on(world: int, tokens: int, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    alone, _ = ranks_of(no_peer(world), LayoutPlan(name="ep", data=world, expert=world))
    beside = torch.randn(tokens, 5, generator=drawn).view(torch.int32)
    ids = torch.stack([torch.randperm(8, generator=drawn)[:3] for _ in range(tokens)] or
                      [torch.zeros(0, dtype=torch.int64)]).view(tokens, 3).int()  # fmt: skip
    message = torch.cat((beside, ids), dim=1)
    found = alone.ranks.domains.start_rows(message, numbers=3).wait()
    assert torch.equal(found[:, :5], beside.repeat(world, 1))
    assert torch.equal(found[:tokens], message)
    moved = [(ids + peer * 8 // world) % 8 for peer in range(world)]
    assert torch.equal(found[:, 5:], torch.cat(moved))


def test_bytes_are_this_rank_s_own() -> None:
    """Rows that were rounded: no number of theirs becomes NaN."""
    x = torch.arange(256, dtype=torch.uint8).view(2, 128)
    found = run(Op.ALL_GATHER, x, 4, experts=256)
    assert torch.equal(found.view(8, 128), x.repeat(4, 1))


def test_a_sum_has_something_in_every_row_and_is_the_same_each_time() -> None:
    x = torch.zeros(3, 64)
    first, again = run(Op.ALL_REDUCE, x, 4), run(Op.ALL_REDUCE, x, 4)
    assert torch.equal(first, again) and bool((first.abs().sum(dim=1) > 0).all())
    assert not torch.equal(first[0], first[1])
    shifted = run(Op.ALL_REDUCE, x + 1, 4)
    assert torch.equal(shifted, first + 1)
    inplace = x.clone()
    run(Op.ALL_REDUCE, inplace, 4, inplace)
    assert torch.equal(inplace, first)
    assert run(Op.ALL_REDUCE, torch.tensor([3, 5], dtype=torch.int32), 4).tolist() == [12, 20]


def test_a_message_longer_than_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    from metainfer.comm.backends import emulated

    monkeypatch.setattr(emulated, "NOISE", 5)
    found = run(Op.ALL_REDUCE, torch.zeros(13), 2, torch.full((13,), float("nan")))
    assert torch.equal(found, found[:5].repeat(3)[:13]) and bool(found.isfinite().all())


@pytest.mark.parametrize("count", [0, 1, 7, 8, 12])
def test_a_scattered_sum_is_this_rank_s_part_of_the_sum(count: int) -> None:
    x = torch.randn(count, dtype=torch.float64)
    begin, end = shard(count, 4, 0)
    out = torch.full((end - begin,), float("nan"), dtype=torch.float64)
    found = run(Op.REDUCE_SCATTER, x, 4, out)
    assert torch.equal(found, run(Op.ALL_REDUCE, x[begin:end].contiguous(), 4))


def priced(op: Op, count: int, backend: str, algorithm: str, world: int = 4) -> CommPlan:
    request = Request(op=op, count=count, dtype="bfloat16", world=world)
    return choose(request, [Offer(backend=backend, algorithm=algorithm)])


def test_bytes_on_the_link_are_those_of_the_cost_table() -> None:
    size = 4096  # bytes; N = 4
    table = {
        ("ipc", "one_shot"): (3 * size, 3 * size),
        ("ipc", "two_shot"): (6 * size // 4, 6 * size // 4),
        ("host", "one_shot"): (size, 3 * size),
        ("host", "two_shot"): (size, 6 * size // 4),
        ("host", "copy"): (size, 6 * size // 4),
        ("nccl", "ring"): (6 * size // 4, 6 * size // 4),
    }
    for (backend, algorithm), moved in table.items():  # `host` leaves its own part out
        assert traffic(priced(Op.ALL_REDUCE, size // 2, backend, algorithm)) == moved
    gather = {"ipc": (3 * size // 4, 3 * size // 4), "host": (size // 4, 3 * size // 4)}
    for backend, moved in gather.items():
        assert traffic(priced(Op.ALL_GATHER, size // 2, backend, "direct")) == moved
    assert traffic(priced(Op.REDUCE_SCATTER, size // 2, "ipc", "direct")) == (3072, 3072)
    for backend, sent in (("ipc", 3 * size), ("host", size)):
        assert traffic(priced(Op.BROADCAST, size // 2, backend, "direct")) == (sent, 0)


def ranks_of(tree: Any, layout: LayoutPlan, method: str = "auto") -> tuple[EmulatedRanks, NoWait]:
    wait = NoWait()
    cpu = torch.device("cpu")
    return EmulatedRanks(Place(layout, 0), tree, cpu, method=method, experts=8, wait=wait), wait


def test_the_price_is_the_model_s_on_the_named_machine_s_tree() -> None:
    layout = LayoutPlan(name="tp4", tensor=4)
    size = 64 * KIB
    x = torch.zeros(size // 4)
    for tree, formulas, paths in (
        (no_peer(4), model.HOST, {"host:two_shot"}),
        (one_switch(4), model.PEER, {"ipc:one_shot", "ipc:two_shot"}),
    ):
        alone, wait = ranks_of(tree, layout)
        alone.ranks.tensor.sum(x)
        built = [formulas[name](tree, size, model.SEEDS) for name in ("one_shot", "two_shot")]
        assert wait.prices[0].us == pytest.approx(min(built))
        assert set(alone.describe()) <= paths and alone.waited.calls == 1


def test_nccl_is_asked_for_by_name_and_of_its_own_class() -> None:
    alone, wait = ranks_of(no_peer(4), LayoutPlan(name="tp4", tensor=4), "nccl")
    alone.ranks.tensor.sum(torch.zeros(16 * KIB))
    assert alone.describe() == {"nccl:ring": 1.0}
    assert wait.prices[0].us == pytest.approx(model.nccl_through_host(no_peer(4), 64 * KIB))


def test_groups_that_talk_at_once_have_their_part_of_host_memory() -> None:
    half = LayoutPlan(name="2xtp4", tensor=4, data=2)
    whole, wait = ranks_of(no_peer(8), LayoutPlan(name="tp4", tensor=4))
    part, slower = ranks_of(no_peer(8), half)
    x = torch.zeros(1 << 20)
    whole.ranks.tensor.sum(x)
    part.ranks.tensor.sum(x)
    assert slower.prices[0].us > 1.5 * wait.prices[0].us


def test_captured_calls_take_no_path_that_graphs_do_not_have() -> None:
    from metainfer.comm.emulated_ranks import _communicator

    wait = NoWait()
    comm = _communicator(wait, no_peer(2), "auto", 0)
    big = Request(op=Op.ALL_REDUCE, count=32 << 20, dtype="bfloat16", world=2)
    captured = Request(
        op=Op.ALL_REDUCE, count=32 << 20, dtype="bfloat16", world=2, captured=True,
        precision=Precision.EXACT,
    )  # fmt: skip
    assert (comm.plan(big).algorithm, comm.plan(captured).algorithm) == ("copy", "two_shot")
