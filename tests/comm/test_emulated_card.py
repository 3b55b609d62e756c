"""One rank alone on a card: ``alone.cu`` itself and what enqueues it, on a device of threads."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_of
from test_kernels_on_host import FLAGS

from metainfer.comm import driver, loader
from metainfer.comm.backends import emulated, emulated_card
from metainfer.comm.backends.emulated import EmulatedComm, Form, Price, StandIn
from metainfer.comm.backends.emulated_card import Alone, DeviceWait
from metainfer.comm.request import Op, Request, shard
from metainfer.core.env import cache_dir
from metainfer.kernels import cubin

SOURCE = Path(__file__).with_name("alone_on_host.cpp")
Run = Callable[..., int]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    target = tmp_path_factory.mktemp("alone") / "any.so"
    extra = ("-Wno-unknown-pragmas", "-Wno-psabi", "-march=native")
    subprocess.run(["g++", *FLAGS, *extra, str(SOURCE), "-o", str(target)], check=True)
    found: Run = ctypes.CDLL(str(target)).run_alone
    return found


def blank(**fields: Any) -> tuple[Alone, torch.Tensor]:
    """A call, and its words: ticket, mark, two unused, counts, what the host sees."""
    words = torch.zeros(12, dtype=torch.int64)
    at = words.data_ptr()
    return Alone(room=16, ticket=at, counts=at + 32, seen=at + 64, **fields), words


@pytest.mark.parametrize(
    ("down", "up", "room"),
    [(12288, 12288, 8192), (1024, 16, 512), (64, 64, 128), (0, 0, 4096), (24, 72, 256)],
)
def test_the_kernel_moves_its_bytes_over_and_over(
    kernel: Run, down: int, up: int, room: int
) -> None:
    scratch = torch.arange(room, dtype=torch.int32).to(torch.uint8) | 1
    host, before = torch.zeros(room, dtype=torch.uint8), scratch.clone()
    call, _ = blank(host=host.data_ptr(), scratch=scratch.data_ptr(), down=down, up=up)
    call.room = room
    assert kernel(ctypes.byref(call), 32, 3) == 0, "misaligned"
    sent, back = (min(room, -(-size // 16) * 16) for size in (down, up))
    assert torch.equal(host[:sent], before[:sent]) and not host[sent:].any()
    assert torch.equal(scratch[:back], host[:back])
    assert torch.equal(scratch[back:], before[back:])


def test_a_call_waits_and_counts_once_whatever_its_blocks(kernel: Run) -> None:
    call, words = blank(ns=50_000_000)
    begin = time.monotonic_ns()
    assert kernel(ctypes.byref(call), 32, 3) == 0
    assert time.monotonic_ns() - begin >= 3 * 50_000_000  # here blocks come one after another
    call.ns = 0
    assert kernel(ctypes.byref(call), 32, 1) == 0
    calls, ns, late, late_ns = words[4:8].tolist()
    assert calls == 2 and ns - late_ns == 50_000_000
    assert (late == 0) == (late_ns == 0)  # this host may be slow
    assert torch.equal(words[8:], words[4:8]) and words[0] == 0  # the ticket is there again


def test_what_takes_longer_than_its_time_is_late_by_that(kernel: Run) -> None:
    call, words = blank(ns=1)
    kernel(ctypes.byref(call), 32, 2)
    calls, ns, late, late_ns = words[4:8].tolist()
    assert (calls, late) == (1, 1) and ns == late_ns + 1 and late_ns > 0


def test_a_mark_neither_waits_nor_counts_and_is_where_another_begins(kernel: Run) -> None:
    call, words = blank(ns=int(60e9))
    call.mark = words[1:].data_ptr()
    begin = time.monotonic_ns()
    kernel(ctypes.byref(call), 32, 2)
    assert begin <= int(words[1]) <= time.monotonic_ns()
    assert not words[4:].any() and words[0] == 0
    words[1] = time.monotonic_ns() - int(5e9)  # it has been going on for five seconds
    later, counted = blank(ns=1_000_000, begun=words[1:].data_ptr())
    kernel(ctypes.byref(later), 32, 1)
    assert int(counted[7]) >= int(5e9) - 1_000_000


class Device:
    """`DeviceWait` on threads; `wait` is one that launches by the kernel on the host."""

    def __init__(self, kernel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch = fake_cuda.Torch()
        self.launched: list[Alone] = []
        self.copied: list[tuple[str, int, int, int]] = []
        self.done: list[str] = []  # as streams come to it

        def launch(grid: int, block: int, stream: int, arguments: Sequence[Any]) -> None:
            call = Alone.from_buffer_copy(arguments[0])
            self.launched.append(call)

            def run() -> None:
                assert kernel(ctypes.byref(call), 32, min(grid, 3)) == 0, "misaligned"
                self.done.append("waited" if call.begun else "launched")

            fake_cuda.Stream.known[stream].do(run)

        def copy(way: str) -> Callable[[int, int, int, int], None]:
            def start(target: int, source: int, size: int, stream: int) -> None:
                self.copied.append((way, target, source, size))
                fake_cuda.move(target, source, size, stream)
                fake_cuda.Stream.known[stream].do(lambda: self.done.append(way))

            return start

        monkeypatch.setattr(emulated_card, "torch", self.torch)
        loaded = SimpleNamespace(function={"mi_alone": launch}.__getitem__)
        monkeypatch.setattr(emulated_card, "module", lambda kernels, index: loaded)
        monkeypatch.setattr(driver, "copy_down", copy("down"))
        monkeypatch.setattr(driver, "copy_up", copy("up"))
        monkeypatch.setattr(emulated_card, "ROOM", 4096)
        monkeypatch.setattr(emulated_card, "PIECE", 1024)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        self.wait = DeviceWait(0, launch_us=1.5)

    def carry(self, call: StandIn, price: Price) -> None:
        self.wait.carry(call, price)
        self.torch.cuda.synchronize()


@pytest.fixture
def device(kernel: Run, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(kernel, monkeypatch)


class Both:
    """A wait that fills by the device's kernel and by torch, and compares to the bit."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def carry(self, call: StandIn, price: Price) -> None:
        want = call.out.clone()
        inplace = call.given.data_ptr() == call.out.data_ptr()
        replace(call, out=want, given=want if inplace else call.given).fill()
        self.device.carry(call, price)
        assert torch.equal(call.out.view(torch.uint8), want.view(torch.uint8)), call.form

    def seen(self) -> emulated.Waited:
        return self.device.wait.seen()


KINDS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def spoilt(count: int, kind: torch.dtype, shift: int) -> torch.Tensor:
    """Poisoned, `shift` elements behind an address that is whole packs."""
    return torch.full((count + shift,), 77, dtype=kind)[shift:]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_kernel_stands_in_as_torch_does(kernel: Run, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "NOISE", 64)  # long messages are short ones, then
        comm = EmulatedComm(Both(Device(kernel, patch)), lambda plan: Price(1.0), experts=24)
        world = data.draw(st.sampled_from([2, 3, 4, 8]))
        op = data.draw(st.sampled_from([Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER,
                                        Op.BROADCAST]))  # fmt: skip
        rows, width = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([1, 3, 8, 37, 64]))
        counts = [torch.int32] if op is not Op.ALL_GATHER else [
            torch.int32, torch.int64, torch.uint8]  # fmt: skip
        kind = data.draw(st.sampled_from([*KINDS, *counts]))
        shift = data.draw(st.sampled_from([0, 0, 1]))
        x = spoilt(rows * width, kind, shift)
        if kind.is_floating_point:
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(width)))
        else:
            x.copy_(torch.arange(x.numel()) % 24)
        size = x.numel() * (world if op is Op.ALL_GATHER else 1)
        held = size
        if op is Op.REDUCE_SCATTER:
            begin, end = shard(size, world, 0)
            held = end - begin
        inplace = op in (Op.ALL_REDUCE, Op.BROADCAST) and data.draw(st.booleans())
        out = x if inplace else spoilt(held, kind, data.draw(st.sampled_from([0, 1])))
        name = str(kind).removeprefix("torch.")
        request = Request(op=op, count=size, dtype=name, world=world)
        method = "one_shot" if op is Op.ALL_REDUCE else "direct"
        shaped, numbers = x, 0
        if op is Op.ALL_GATHER:
            shaped = x.view(rows, width)
            numbers = data.draw(st.integers(0, width)) if kind is torch.int32 else 0
        comm.run(plan_of(request, method), shaped, out, numbers=numbers)


def test_numbers_go_on_and_come_round_beside_what_stays(device: Device) -> None:
    x, out = torch.tensor([[99, 0, 5], [-1, 23, 9]]).int(), torch.full((18,), 77).int()
    device.carry(StandIn(Form.IDS, x, out, 3, 2, 3, experts=24, numbers=2), Price(0.0))
    assert out.view(3, 2, 3).tolist() == [
        [[99, 0, 5], [-1, 23, 9]], [[99, 8, 13], [-1, 7, 17]], [[99, 16, 21], [-1, 15, 1]],
    ]  # fmt: skip


def test_rows_that_are_whole_packs_go_as_packs(device: Device) -> None:
    x, out = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    for width, unit in ((64, 16), (32, 16), (16, 8), (8, 4), (4, 2)):
        y = x.view(-1, width)
        rows = len(y)
        device.carry(StandIn(Form.PARTS, y, out, 4, rows, width, width // 4), Price(0.0))
        made = device.launched[-1]
        assert made.unit == unit == math.gcd(16, width // 4 * 2)
        assert made.width * unit == width * 2 and made.turn * unit == width // 4 * 2


def test_a_call_s_launch_is_part_of_its_price(device: Device) -> None:
    x = torch.zeros(64)
    device.carry(StandIn(Form.STAYS, x, x), Price(3000.0, down=100, up=300))
    (made,) = device.launched
    assert made.ns == 2_998_500 and (made.down, made.up) == (100, 300)
    seen = device.wait.seen()
    assert seen.calls == 1 and seen.us - seen.late_us == pytest.approx(3000.0)
    device.carry(StandIn(Form.STAYS, x, x), Price(1.0))  # less than a launch
    assert device.launched[-1].ns == 0 and device.wait.seen().late == seen.late + 1


def test_what_was_launched_to_be_timed_is_no_call(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(wait: DeviceWait) -> float:
        wait._launch(wait._call(None, ns=7), 0)
        device.torch.cuda.synchronize()
        assert int(wait._seen[0]) == 1
        return 2.5

    monkeypatch.setattr(DeviceWait, "_timed_launch", timed)
    wait = DeviceWait(0)
    assert wait.seen() == emulated.Waited()
    x = torch.zeros(4)
    wait.carry(StandIn(Form.STAYS, x, x), Price(1000.0))
    device.torch.cuda.synchronize()
    assert device.launched[-1].ns == 997_500 and wait.seen().calls == 1


def test_a_copied_call_goes_by_engines_and_ends_when_both_ways_are_done(device: Device) -> None:
    given = torch.arange(10_000, dtype=torch.int32).to(torch.uint8)
    call = StandIn(Form.STAYS, given, given)

    def before() -> None:
        time.sleep(0.05)
        device.done.append("before")

    main: Any = device.torch.cuda.current
    main.do(before)
    device.carry(call, Price(1.0, down=10_000, up=5_000, copied=True))
    # Behind what came before, and the last launch behind all copies; each takes a while here.
    assert device.done[0] == "before" and device.done[-1] == "waited"
    assert device.done.count("down") == 10 and device.done.count("up") == 5
    first, last = device.launched
    assert (first.mark, first.down, first.up) == (last.begun, 0, 0) and first.mark
    assert last.mark == last.form == last.down == last.up == 0
    size = {way: [n for w, *_, n in device.copied if w == way] for way in ("down", "up")}
    assert sum(size["down"]) == 10_000 and sum(size["up"]) == 5_000
    assert max(size["down"] + size["up"]) == 1024
    at = given.data_ptr()
    for way, target, source, n in device.copied:
        assert way == "up" or (source == at and target % 1024 == device.copied[0][1] % 1024)
        at += n if way == "down" else 0
    host = device.wait._host
    assert torch.equal(host[: 10_000 % 4096], given[8192:])
    took = device.wait.seen()
    assert took.calls == 1 and took.late == 1  # in no microsecond


def test_the_kernel_s_argument_is_laid_out_as_ours() -> None:
    text = (loader.FOLDER / "alone.cu").read_text()
    body = text[text.index("typedef struct {") : text.index("} MiAlone;")]
    names = body.replace("typedef struct {", "").replace("mi_u64", "").replace(";", ",")
    ours = [name for name, *_ in Alone._fields_]
    assert [name.strip() for name in names.split(",") if name.strip()] == ours
    forms = text[text.index("enum {") + 6 : text.index("};")].replace("MI_", "").split(",")
    assert [form.strip() for form in forms] == [form.name for form in Form]


@pytest.mark.skipif(cubin.find_nvcc() is None, reason="no CUDA compiler here")
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_it_compiles_without_spills(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    built, verdict, log = loader.build(loader.Alone(), arch)
    assert verdict.accepted and built is not None, log
    assert " 0 bytes spill stores, 0 bytes spill loads" in log and "warning" not in log
