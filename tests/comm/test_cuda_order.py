"""The GPU backends' own Python on a device made of threads: what is enqueued, in which order."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import fake_cuda
import hypothesis
import pytest
import torch
from fake_driver_calls import Driver
from hypothesis import strategies as st
from ranks import plan_of
from test_kernels_on_host import FLAGS, SOURCE
from test_local import ALGORITHMS, expected, inputs, same

from metainfer.comm import layout, loader
from metainfer.comm.backends import calls, copy_order, cuda, cuda_copy
from metainfer.comm.backends.copy_order import Staging
from metainfer.comm.backends.cuda_copy import CopyRank
from metainfer.comm.driver import CudaError
from metainfer.comm.errors import CommError
from metainfer.comm.request import ELEMENT_BYTES, Op, Request
from metainfer.core.verdict import reject
from metainfer.kernels import native

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kernels") / "any.so"
    extra = ("-Wno-unknown-pragmas", "-Wno-psabi", "-march=native")
    subprocess.run(["g++", *FLAGS, *extra, str(SOURCE), "-o", str(target)], check=True)
    return target


@pytest.fixture
def calling() -> Driver:
    return Driver()


@pytest.fixture
def fake(
    built: Path, calling: Driver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[fake_cuda.Torch]:
    """`cuda` and `cuda_copy` on threads. Ranks with copies are closed before their memory goes."""
    device = fake_cuda.Torch()
    kernels = fake_cuda.Kernels(built)
    for module in (cuda, cuda_copy):
        monkeypatch.setattr(module, "torch", device)
        monkeypatch.setattr(module, "module", lambda variant, index: kernels)
        monkeypatch.setattr(
            module,
            "checked",
            lambda r, rank, given, out, device: calls.checked(r, rank, given, out),
        )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(cuda_copy.driver, "copy_up", fake_cuda.move)
    for name in ("in_streams", "create_event", "destroy_event"):
        monkeypatch.setattr(cuda_copy.driver, name, getattr(calling, name))
    yield device
    while OPENED:
        _, ranks = OPENED.pop()
        for rank in ranks:
            rank.close()


OPENED: list[tuple[torch.Tensor, list[CopyRank]]] = []


def on_all(fake: fake_cuda.Torch, streams: Any, step: Callable[[int], Any]) -> list[Any]:
    found = []
    for rank, stream in enumerate(streams):
        with fake.cuda.stream(stream):
            found.append(step(rank))
    fake.cuda.synchronize()
    return found


@pytest.mark.parametrize("host", [False, True], ids=["local", "host"])
def test_virtual_ranks_on_streams(fake: fake_cuda.Torch, host: bool, seed: int) -> None:
    world = 3
    with cuda.CudaLocalGroup(
        world, host_memory=host, slot_bytes=1 << 16, first_call=(1 << 40) - 3
    ) as group:
        for op, algorithm in ALGORITHMS:
            for count in (0, 3, 48_000):  # the last in several blocks and pieces
                request = Request(op=op, count=count, dtype="bfloat16", world=world, root=2)
                plan, given = plan_of(request, algorithm), inputs(request, seed + count)
                for comm in group.ranks:
                    comm.warm(plan)
                results = on_all(
                    fake,
                    group.streams,
                    lambda r: group.ranks[r].run(plan, given[r]),  # noqa: B023
                )
                for rank, result in enumerate(results):
                    group.ranks[rank].check()
                    assert same(result, expected(request, given, rank)), (op, algorithm, count)


def test_grids_are_by_size_and_in_host_memory_by_the_table(fake: fake_cuda.Torch) -> None:
    found = {}
    for world, host in ((2, True), (2, False), (8, True)):
        with cuda.CudaLocalGroup(world, host_memory=host, slot_bytes=1 << 22) as group:
            for kib in (8, 16, 128, 256, 512, 1024, 2048, 4096):
                request = Request(op=Op.ALL_REDUCE, count=kib << 9, dtype="bfloat16", world=world)
                call, piece = group.ranks[0].calls_of(plan_of(request, "one_shot"))[0]
                found[world, host, kib] = group.ranks[0]._grid(piece, call.width)
    long = {8: (1, 1), 16: (4, 1), 128: (8, 1), 256: (16, 4), 512: (8, 4)}
    for (_, host, kib), grid in found.items():
        assert grid == (long.get(kib, (16, 8)) if host else (min(layout.BLOCKS, kib // 8), 1))
    sizes = [least for least, *_ in cuda.GRIDS]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("capability", "early"), [((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_calls_come_early_where_a_device_has_the_instruction(
    fake: fake_cuda.Torch,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    early: bool,
) -> None:
    monkeypatch.setattr(fake.cuda, "get_device_capability", lambda device: capability)
    with cuda.CudaLocalGroup(2) as group:
        request = Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=2)
        plan, given = plan_of(request, "one_shot"), torch.ones(64, dtype=torch.bfloat16)
        for comm in group.ranks:
            comm.warm(plan)  # alone: nothing follows it before the barrier of all ranks
        kernels = cast(fake_cuda.Kernels, cuda.module(loader.Variant(2, 0), 0))
        assert kernels.early == {("mi_clear", False), ("mi_all_kernel", False)}
        on_all(fake, group.streams, lambda r: group.ranks[r].run(plan, given))
        assert (("mi_all_kernel", True) in kernels.early) is early


def test_a_rank_that_does_not_call_is_named_afterwards(fake: fake_cuda.Torch) -> None:
    group = cuda.CudaLocalGroup(3, budget_s=0.2)
    plan = plan_of(Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=3), "one_shot")
    given = torch.zeros(64, dtype=torch.bfloat16)
    on_all(fake, group.streams, lambda r: r == 1 or group.ranks[r].run(plan, given))
    for rank in (0, 2):
        with pytest.raises(CommError, match="rank 1") as caught:
            group.ranks[rank].check()
        assert caught.value.peer == 1
        with pytest.raises(CommError):
            group.ranks[rank].run(plan, given)


def copy_ranks(
    world: int, by_streams: bool = True, *, part: int = 1 << 16, budget_s: float = 20.0
) -> list[CopyRank]:
    memory = torch.zeros(Staging.size(world, part) + 4096, dtype=torch.uint8)
    base = -(-memory.data_ptr() // 4096) * 4096
    staging = Staging(base, base, world, part)
    ranks = [
        CopyRank(rank, staging, device=0, by_streams=by_streams, budget_s=budget_s)
        for rank in range(world)
    ]
    OPENED.append((memory, ranks))
    return ranks


BY_WORLD = [(2, True), (2, False), (3, True)]
"""Ranks, and whether their streams write and await counters by themselves."""
COPIED = {Op.ALL_REDUCE: "bfloat16", Op.REDUCE_SCATTER: "bfloat16", Op.ALL_GATHER: "uint8"}


@pytest.mark.parametrize(("world", "by_streams"), BY_WORLD)
@pytest.mark.parametrize("op", COPIED)
def test_copies_are_exact_in_any_piece_and_call_after_call(
    fake: fake_cuda.Torch, op: Op, world: int, by_streams: bool, seed: int
) -> None:
    ranks = copy_ranks(world, by_streams)
    streams = [fake_cuda.Stream() for _ in range(world)]
    draw = random.Random(seed)
    for turn, count in enumerate((1, 7, 1000, 30_001, 30_001, 16 * world, 5000)):
        request = Request(op=op, count=count, dtype=COPIED[op], world=world)
        plan, given = plan_of(request, "copy", "host"), inputs(request, seed + turn)
        for rank in ranks:
            rank.piece_bytes = 2048 if turn % 2 else 0
        out = [poisoned(request, rank) for rank in range(world)]
        order = list(range(world))
        draw.shuffle(order)
        for rank in order:  # a late rank must not matter
            with fake.cuda.stream(streams[rank]):
                ranks[rank].run(plan, given[rank], out[rank])
            time.sleep(draw.random() * 0.01)
        fake.cuda.synchronize()
        for rank in range(world):
            ranks[rank].check()
            assert same(out[rank], expected(request, given, rank)), (count, rank)


@hypothesis.given(st.integers(0, 5000), st.integers(1, 40))
def test_pieces_are_equal_and_leave_nothing_out(count: int, wanted: int) -> None:
    pieces = list(copy_order.even(count, wanted))
    assert pieces[0][0] == 0 and pieces[-1][1] == count and len(pieces) <= wanted
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    *whole, last = [end - begin for begin, end in pieces]
    assert len(set(whole)) <= 1 and all(size % 8 == 0 and last <= size for size in whole)
    assert max([*whole, last]) < count / wanted + 8


def exchange_s(pieces: list[int]) -> float:
    """Seconds until the last of `pieces` (bytes) is up, where each goes up once it is down: alone a
    way has its own rate, both together share one; each copy begins with its setup."""
    work = [[[copy_order.SETUP_S, float(size)] for size in pieces] for _ in range(2)]
    ways, now = [0, 0], 0.0
    while ways[1] < len(pieces):
        open_ = [w for w in range(2) if ways[w] < len(pieces) and (w == 0 or ways[1] < ways[0])]
        moving = [w for w in open_ if work[w][ways[w]][0] <= 0]
        rate = copy_order.BOTH / 2 if len(moving) == 2 else copy_order.ALONE
        ends = [work[w][ways[w]][1] / rate if w in moving else work[w][ways[w]][0] for w in open_]
        step = min(ends)
        now += step
        for w, end in zip(open_, ends, strict=True):
            part = int(w in moving)
            work[w][ways[w]][part] -= step * (rate if part else 1)
            if end == step:
                work[w][ways[w]][part] = 0.0
                if part:
                    ways[w] += 1
    return now


@pytest.mark.parametrize("mib", [1, 4, 8, 16, 32, 64, 256])
def test_the_number_of_pieces_is_the_best_one(mib: int) -> None:
    """By an event simulation that knows nothing of the formula; and growing and shrinking pieces,
    the form of before, are no better than equal ones."""
    size = mib << 20
    request = Request(op=Op.ALL_REDUCE, count=size // 2, dtype="bfloat16", world=2)
    bounds = copy_order.cut(request, 0, 0).pieces
    taken = exchange_s([2 * (end - begin) for begin, end in bounds])
    times = {n: exchange_s([size // n] * n) for n in range(1, 65)}
    assert taken < 1.01 * min(times.values()), (len(bounds), min(times, key=lambda n: times[n]))
    ramp = [1, 2, 4, 4, 4, 2, 1]
    parts = [size * each // sum(ramp) for each in ramp]
    assert min(times.values()) < exchange_s(parts)


def poisoned(request: Request, rank: int) -> torch.Tensor:
    """Room for a result, with bytes in it that no sum gives."""
    count = calls.result_count(request, rank)
    return (
        torch.full((count,), 255, dtype=torch.uint8)
        .repeat_interleave(ELEMENT_BYTES[request.dtype])
        .view(calls.DTYPES[request.dtype])
    )


@pytest.mark.parametrize(("world", "by_streams"), BY_WORLD)
def test_calls_in_a_row_do_not_mix(
    fake: fake_cuda.Torch, world: int, by_streams: bool, seed: int
) -> None:
    """Of all kinds, for each leaves the staging memory to the next; nobody waits, so that a quick
    rank may be a call ahead. Sums are in place: what is read may not be written yet."""
    count = 9001
    ranks = copy_ranks(world, by_streams)
    streams = [fake_cuda.Stream() for _ in range(world)]
    draw = random.Random(seed)
    ops = [*COPIED, *COPIED, *draw.choices(list(COPIED), k=4)]
    requests = [Request(op=op, count=count, dtype="bfloat16", world=world) for op in ops]
    given = [inputs(request, seed + turn) for turn, request in enumerate(requests)]
    made = [[torch.full_like(part, float("nan")) for part in parts] for parts in given]
    out, seen = (
        [[poisoned(request, rank) for rank in range(world)] for request in requests]
        for _ in range(2)
    )

    def make(turn: int, rank: int, nap: float) -> None:
        """The stream's own work before a call: the input is not there until it is done."""
        time.sleep(nap)
        made[turn][rank].copy_(given[turn][rank])

    for turn, request in enumerate(requests):
        plan = plan_of(request, "copy")
        for rank in range(world):
            ranks[rank].piece_bytes = 4096
            with fake.cuda.stream(streams[rank]):
                nap = draw.random() * 0.02
                streams[rank].do(lambda turn=turn, rank=rank, nap=nap: make(turn, rank, nap))
                if request.op is Op.ALL_REDUCE:
                    out[turn][rank] = made[turn][rank]
                ranks[rank].run(plan, made[turn][rank], out[turn][rank])
                # What the stream finds afterwards, not what is there in the end.
                streams[rank].do(
                    lambda turn=turn, rank=rank: seen[turn][rank].copy_(out[turn][rank])
                )
    fake.cuda.synchronize()
    for turn, request in enumerate(requests):
        for rank in range(world):
            ranks[rank].check()
            assert same(seen[turn][rank], expected(request, given[turn], rank)), (turn, rank)


@pytest.mark.parametrize("op", COPIED)
def test_staging_memory_is_written_once_everyone_has_taken_the_call_before(
    fake: fake_cuda.Torch, calling: Driver, op: Op, seed: int
) -> None:
    """Rank 1 sends, and is held up before it takes: rank 0 is done with its first call, and may not
    go on to write the second."""
    ranks = copy_ranks(2)
    streams = [fake_cuda.Stream() for _ in range(2)]
    gate, second = threading.Event(), threading.Event()
    opened: list[bool] = []

    def note() -> None:
        opened.append(gate.is_set())
        if len(opened) == 2:
            second.set()

    def noted(name: str, stream: int) -> None:
        if stream == ranks[0]._streams["down"].cuda_stream:
            fake_cuda.Stream.known[stream].do(note)

    calling.noted = noted
    ranks[1]._streams["up"].do(lambda: gate.wait(60))
    request = Request(op=op, count=1000, dtype="bfloat16", world=2)
    given = [inputs(request, seed + turn) for turn in range(2)]
    out = [[poisoned(request, rank) for rank in range(2)] for _ in range(2)]
    for turn in range(2):
        for rank in range(2):
            with fake.cuda.stream(streams[rank]):
                ranks[rank].run(plan_of(request, "copy"), given[turn][rank], out[turn][rank])
    second.wait(0.2)  # it must not come
    gate.set()
    fake.cuda.synchronize()
    assert opened == [False, True]
    for turn in range(2):
        for rank in range(2):
            assert same(out[turn][rank], expected(request, given[turn], rank)), (turn, rank)


@pytest.mark.parametrize("by_streams", [True, False])
def test_copies_without_a_peer_end_in_words(fake: fake_cuda.Torch, by_streams: bool) -> None:
    ranks = copy_ranks(2, by_streams, budget_s=0.1)
    plan = plan_of(Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=2), "two_shot")
    given, out = (torch.zeros(64, dtype=torch.bfloat16) for _ in range(2))
    ranks[0].run(plan, given, out)
    fake.cuda.synchronize()
    with pytest.raises(CommError, match="waited in vain for rank 1") as caught:
        ranks[0].check()
    assert caught.value.peer == 1 and not caught.value.secondary
    ranks[1].budget_s = 20
    for _ in range(2):  # the first finds what rank 0 had sent, the second nothing
        ranks[1].run(plan, given, out)
    ranks[1].abort()
    fake.cuda.synchronize()
    with pytest.raises(CommError, match="gave up waiting for rank 0") as caught:
        ranks[1].check()
    assert caught.value.secondary and not any(given)


@pytest.mark.parametrize("compiler", [True, False])
def test_a_collective_that_the_driver_breaks_off_is_the_last_one(
    fake: fake_cuda.Torch, calling: Driver, monkeypatch: pytest.MonkeyPatch, compiler: bool
) -> None:
    """Its counters have gone on and its peers have not heard: what comes later would mix calls."""
    if not compiler:
        none = reject("compiler", "no working C compiler")
        monkeypatch.setattr(native, "try_load", lambda source: (None, none))
    broken = CudaError("cuMemcpyDtoHAsync_v2, step 9 of 30, failed: no (1).")
    monkeypatch.setattr(cuda_copy.driver, "library", lambda: None)
    monkeypatch.setattr(cuda_copy.driver, "check", lambda found, name, status: raise_(broken))
    ranks = copy_ranks(2, budget_s=0.1)
    assert bool(ranks[0].enqueue.refused.reasons) is not compiler
    plan = plan_of(Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=2), "copy")
    given, out = (torch.zeros(64, dtype=torch.bfloat16) for _ in range(2))
    calling.failing = (8, 1)
    with pytest.raises(CudaError, match="cuMemcpyDtoHAsync"):
        ranks[0].run(plan, given, out)
    calling.failing = None
    asked = len(calling.asked)
    for _ in range(2):
        with pytest.raises(CommError, match=r"rank 0 broke off: cuMemcpyDtoHAsync.* failed: no"):
            ranks[0].run(plan, given, out)
    assert len(calling.asked) == asked


def raise_(error: Exception) -> None:
    raise error


def test_a_peer_that_comes_after_its_time_finds_the_group_broken(fake: fake_cuda.Torch) -> None:
    """It counts over what waits were let find: they are let go again, and the error stays."""
    ranks = copy_ranks(2, budget_s=60)
    plan = plan_of(Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=2), "two_shot")
    given, out = (torch.zeros(64, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        ranks[0].run(plan, given, out)
    ranks[0].budget_s = 0.1
    fake.cuda.synchronize()
    ranks[0]._counter(1, copy_order.ALL).value = 1  # as a late rank 1 would
    limit = time.monotonic() + 60
    while ranks[0]._counter(1, copy_order.ALL).value != cuda_copy.FAR:
        assert time.monotonic() < limit
        time.sleep(0.001)
    with pytest.raises(CommError, match="rank 1"):
        ranks[0].run(plan, given, out)


def test_a_rank_that_is_closed_can_still_be_told_of_a_death(fake: fake_cuda.Torch) -> None:
    """Its staging memory is gone by then: who watches peers must not write there."""
    gone: list[bool] = []
    ranks = copy_ranks(2)
    ranks[0]._closing = lambda: gone.append(True)
    word = ranks[0].staging.word(0, copy_order.ABORT, 0)
    ranks[0].close()
    ranks[0].abort()
    assert gone == [True] and ranks[0].staging.here(word).value == 0
