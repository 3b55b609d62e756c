"""Ranks between cards, on a device of threads: opening, agreeing, proving, failing in words."""

from __future__ import annotations

import ctypes
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from fake_driver_calls import Driver
from test_cuda_order import built as built
from test_local import same

from metainfer.comm import card_ranks
from metainfer.comm.backends import calls, copy_order, cuda, cuda_copy
from metainfer.comm.card_ranks import CardRanks
from metainfer.comm.driver import CudaError
from metainfer.comm.errors import CommError
from metainfer.comm.exact import canonical_sum
from metainfer.comm.layout import Kind
from metainfer.comm.peers import Place
from metainfer.comm.plan import AUTO
from metainfer.comm.plan_offers import COPIED
from metainfer.comm.request import Op
from metainfer.comm.rooms import room_of
from metainfer.comm.topology import Topology, no_peer, one_switch
from metainfer.core.errors import RefusedError
from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import reject

TP2 = LayoutPlan(name="tp2", tensor=2)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


class Memory:
    """Device memory that is the host's: its handle is its address."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}

    def allocate(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(size + 4096)
        address = ctypes.addressof(buffer) // 4096 * 4096 + 4096
        self.held[address] = buffer
        return address

    def free(self, address: int) -> None:
        del self.held[address]


@pytest.fixture
def memory(built: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """A process's driver and device, made of this host."""
    calling = Driver()
    device, kernels, found = fake_cuda.Torch(), fake_cuda.Kernels(built, wait=True), Memory()
    for module in (cuda, cuda_copy, card_ranks):
        monkeypatch.setattr(module, "torch", device)
    for module in (cuda, cuda_copy):
        monkeypatch.setattr(module, "module", lambda variant, index: kernels)
        monkeypatch.setattr(
            module,
            "checked",
            lambda r, rank, given, out, device: calls.checked(r, rank, given, out),
        )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name, step in {
        "copy_up": fake_cuda.move,
        "in_streams": calling.in_streams,
        "create_event": calling.create_event,
        "destroy_event": calling.destroy_event,
        "counts": lambda device: True,
        "register_host": lambda address, size: address,
        "unregister_host": lambda address: None,
        "allocate": found.allocate,
        "free": found.free,
        "export_memory": lambda address: address.to_bytes(8, "little"),
        "import_memory": lambda handle: int.from_bytes(handle, "little"),
        "drop_memory": lambda address: None,
    }.items():
        monkeypatch.setattr(cuda.driver, name, step)
    return found


def on_ranks(world: int, step: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world) as pool:
        return [each.result(120) for each in [pool.submit(step, rank) for rank in range(world)]]


def opened(tree: Topology, layout: LayoutPlan = TP2, **options: Any) -> list[CardRanks]:
    token = secrets.token_hex(6)
    wish: dict[str, Any] = {"dtype": "float32", "most_bytes": 1 << 20, **options}
    cpu = torch.device("cpu")
    return on_ranks(
        layout.ranks, lambda rank: CardRanks(token, Place(layout, rank), tree, cpu, **wish)
    )


def held_on_card(ranks: list[CardRanks], memory: Memory) -> list[int]:
    """By rank; slabs on cards are as many and as large on all."""
    found = []
    for each in ranks:
        copies = [group.opened.get(card_ranks.HOST_COPY) for group in each._groups.values()]
        held = [one._scratch.numel() for one in copies if isinstance(one, cuda_copy.CopyRank)]
        slabs = sum(len(buffer) - 4096 for buffer in memory.held.values()) // len(ranks)
        found.append(sum(held) + slabs)
    return found


def paths(ranks: CardRanks) -> dict[str, float]:
    found: dict[str, float] = {}
    for group in ranks.describe().values():
        found.update(group["share"])
    return found


@pytest.mark.parametrize(
    ("tree", "options", "path"),
    [
        (no_peer(2), {}, "host:one_shot"),
        (one_switch(2), {}, "ipc:one_shot"),
        (one_switch(2), {"method": "host"}, "host:one_shot"),
        (no_peer(2), {"sharing": True, "method": "ipc"}, None),
    ],
    ids=["host", "ipc", "host by name", "one device"],
)
def test_sums_and_stacks_over_cards(
    memory: Memory, tree: Topology, options: dict[str, Any], path: str | None
) -> None:
    if path is None:  # the tree of a device that ranks share says that they may meet
        import dataclasses

        tree = dataclasses.replace(tree, peer=True)
    ranks = opened(tree, **options)
    room = room_of(TP2, 1 << 20, peers=tree.peer is True, method=options.get("method", AUTO))
    assert held_on_card(ranks, memory) == [room.device] * 2
    parts = [torch.randn(5, 6, generator=torch.Generator().manual_seed(r)) for r in range(2)]

    def step(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        peers = ranks[rank].ranks.tensor
        found = peers.sum(parts[rank].clone()), peers.columns(parts[rank])
        cuda.torch.cuda.current_stream().synchronize()
        ranks[rank].check()
        return found

    for summed, columns in on_ranks(2, step):
        assert same(summed, canonical_sum(parts))
        assert torch.equal(columns, torch.cat(parts, dim=1))
    for each in ranks:
        shares = paths(each)
        assert path is None or path in shares
        assert path is not None or set(shares) <= {"ipc:one_shot", "ipc:direct", "ipc:two_shot"}
    on_ranks(2, lambda rank: ranks[rank].close())
    assert not memory.held


def test_a_backend_that_one_rank_cannot_open_is_used_by_none(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lock, asked = cuda.driver.export_memory, threading.Lock(), list[int]()

    def export(address: int) -> bytes:
        with lock:
            asked.append(address)
            if len(asked) == 1:
                raise CudaError("cuIpcGetMemHandle failed: operation not supported (801).")
        return real(address)

    monkeypatch.setattr(cuda.driver, "export_memory", export)
    ranks = opened(one_switch(2))
    for each in ranks:
        (group,) = each._groups.values()
        assert "ipc" not in group.opened and "host" in group.opened
        said = " ".join(reason.message for reason in group._verdicts["ipc"].reasons)
        assert "operation not supported" in said and "rank " in said
    on_ranks(2, lambda rank: ranks[rank].close())


def test_what_only_one_rank_could_open_is_closed_again(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, asked = threading.Lock(), list[int]()

    def register(address: int, size: int) -> int:
        with lock:
            asked.append(address)
            if len(asked) == 1:
                raise CudaError("cuMemHostRegister failed: out of memory (2).")
        return address

    monkeypatch.setattr(cuda.driver, "register_host", register)
    ranks = opened(no_peer(2))
    for each in ranks:
        (group,) = each._groups.values()
        assert set(group.opened) == {"host:copy"}
        (reason,) = group._verdicts["host"].reasons
        assert "out of memory" in reason.message and reason.message.startswith("rank ")
    on_ranks(2, lambda rank: ranks[rank].close())


def test_a_backend_that_sums_wrongly_is_not_used(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = card_ranks.canonical_sum

    def other(parts: Any) -> torch.Tensor:
        found = real(parts)
        found[-1] += parts[0].numel() == 70_001  # the longest of what is tried
        return found

    monkeypatch.setattr(card_ranks, "canonical_sum", other)
    ranks = opened(no_peer(2))
    for each in ranks:
        (group,) = each._groups.values()
        assert not group.opened
        for name in ("host", "host:copy"):
            (reason,) = group._verdicts[name].reasons
            assert reason.code == "wrong" and "wrong bytes at 70001 elements" in reason.message
    on_ranks(2, lambda rank: ranks[rank].close())


def test_every_form_that_calls_may_take_is_proven(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grids of long calls, sums in place, and many pieces, at the longest of what is tried; by size
    again afterwards."""
    seen, pieces = set(), set()
    run = fake_cuda.Kernels.mi_kernel

    def kernel(self: Any, grid: int, block: int, call: Any) -> None:
        if call.in_len[0] == 70_001 and call.kind == Kind.SUM_ALL:
            seen.add((grid, call.lag, call.input == call.output))
        run(self, grid, block, call)

    class Order(copy_order.Order):
        def __init__(self, means: Any, request: Any, *, in_place: bool, piece_bytes: int) -> None:
            count = len(copy_order.cut(request, means.rank, piece_bytes).pieces)
            pieces.add((request.op, count > 4, in_place))
            super().__init__(means, request, in_place=in_place, piece_bytes=piece_bytes)

    monkeypatch.setattr(fake_cuda.Kernels, "mi_kernel", kernel)
    monkeypatch.setattr(cuda_copy, "Order", Order)
    ranks = opened(no_peer(2))
    assert {(blocks, lag) for blocks, lag, _ in seen} >= {(b, lag) for _, b, lag in cuda.GRIDS}
    assert {True, False} == {in_place for *_, in_place in seen}
    assert {(op, True, op is Op.ALL_REDUCE) for op in COPIED} <= pieces
    for each in ranks:
        (group,) = each._groups.values()
        assert (group.opened["host"].blocks, group.opened["host"].lag) == (0, 0)
        assert group.opened["host:copy"].piece_bytes == 0
        assert each.describe()["0-1"]["interpreted"] == []
        group.opened["host:copy"].enqueue.refused = reject("compiler", "no C compiler")
        assert each.describe()["0-1"]["interpreted"] == ["no C compiler"]
    on_ranks(2, lambda rank: ranks[rank].close())


def test_what_was_asked_for_and_cannot_be_is_refused_with_every_reason(memory: Memory) -> None:
    ranks = opened(no_peer(2), method="ipc")
    with pytest.raises(RefusedError, match="ipc was asked for") as caught:
        ranks[0].ranks.tensor.sum(torch.zeros(8))
    assert "may not write into each other" in str(caught.value.reasons)
    two = LayoutPlan(name="2xtp2", tensor=2, data=2)
    ranks = opened(no_peer(4), two, method="nccl")
    with pytest.raises(RefusedError, match="nccl was asked for") as caught:
        ranks[0].ranks.tensor.sum(torch.zeros(8))
    assert "one group of all ranks" in str(caught.value.reasons)


@pytest.mark.parametrize("tree", [no_peer(2), one_switch(2)], ids=["host", "ipc"])
def test_a_dead_peer_ends_the_wait_and_the_error_names_the_collective(
    memory: Memory, tree: Topology
) -> None:
    """Rank 1 dies while rank 0 waits for it: not after the budget, which is minutes here."""
    ranks = opened(tree)
    (group,) = ranks[0]._groups.values()
    name = "ipc" if tree.peer else "host"
    comm = group.opened[name]
    peers = ranks[0].ranks.tensor
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        peers.sum(torch.zeros(2048))
        cuda.torch.cuda.current_stream().synchronize()
        ranks[0].check()

    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(wait)
        assert waiting.wait(60)
        for control in group._controls:  # what the guard's thread does when it sees the end
            control._died(1)
        with pytest.raises(CommError, match="rank 1 died") as caught:
            done.result(120)
    assert time.monotonic() - begin < card_ranks.WARM_S / 2
    assert "all_reduce of 8192 B (float32) over 2 ranks failed on rank 0" in str(caught.value)
    assert caught.value.peer == 1 and not caught.value.secondary
    assert getattr(comm, "_died") == 1  # noqa: B009


def test_waits_are_patient_until_all_are_warm_and_captured_ones_never(memory: Memory) -> None:
    from metainfer.comm.request import Op, Request

    ranks = opened(no_peer(2))
    (group,) = ranks[0]._groups.values()
    comm = group.opened["host"]
    assert comm.budget_s == card_ranks.WARM_S  # type: ignore[attr-defined]
    budgets: list[int] = []
    comm._functions = {  # type: ignore[attr-defined]
        (layout_code, rows, kind): lambda *given, early: budgets.append(given[3][0].budget_ns)
        for layout_code in range(6)
        for rows in (False, True)
        for kind in Kind
    }
    for captured in (False, True):
        request = Request(op=Op.ALL_REDUCE, count=8, dtype="float32", world=2, captured=captured)
        group.comm.run(request, torch.zeros(8))
    ranks[0].settle()
    group.comm.run(Request(op=Op.ALL_REDUCE, count=8, dtype="float32", world=2), torch.zeros(8))
    patient, live = int(card_ranks.WARM_S * 1e9), int(cuda.BUDGET_S * 1e9)
    assert budgets == [patient, live, live]
