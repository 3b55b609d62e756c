"""`cuda_experts.cu` on the host (`experts_on_host.cpp`), the source that a card gets: rounding bit
for bit, both products against float64. The instruction is in words there (`cuda_software.h`)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.core.step import Phase
from metainfer.core.verdict import reject
from metainfer.kernels import cubin
from metainfer.kernels.audit import target_facts
from metainfer.kernels.driver import CudaError
from metainfer.ops.catalog import builtin_registry, op_cases
from metainfer.ops.moe_experts import cuda_experts
from metainfer.ops.moe_experts.cuda_experts import Mx, Product, products, rounded, sent_rounded
from metainfer.ops.moe_experts.cuda_tiles import MX_CHUNK, MX_STREAM, MxTile, mx_for
from metainfer.ops.moe_experts.rounded import rounded_rows
from metainfer.ops.qualify import applies, check

REGISTRY = builtin_registry()
HOST = Path(__file__).with_name("experts_on_host.cpp")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas")
NAMES = ("mx_round", "mx_up", "mx_down")
TILES = pytest.mark.parametrize("tile", [MX_STREAM, MX_CHUNK], ids=["few", "many"])
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
NAN = 255
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


class Rounding(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "out", "scales", "stride")),
        ("rows", ctypes.c_uint32), ("blocks", ctypes.c_uint32),
    )  # fmt: skip


class HostKernels:
    """Stands in for a card; `back`: the last thread of a block goes first, and copies are done at
    once, not when they are waited for."""

    def __init__(self, library: Path, tile: MxTile, back: bool = False) -> None:
        self.tile, self._run, self._back = tile, ctypes.CDLL(str(library)).run, back

    def launch(self, name: str, grid: int, *arguments: Any) -> None:
        if name == "mx_round":
            arguments = (Rounding(*(each.value for each in arguments)),)
        outcome = self._run(NAMES.index(name), ctypes.byref(arguments[0]), grid, self._back)
        assert outcome == 0, "misplaced" if outcome == 1 else "threads wait for each other"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than such small products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("experts")

    @cache
    def built(tile: MxTile) -> Path:
        target = folder / f"{tile.m}.so"
        command = ["g++", *FLAGS, *tile.source().defines, str(HOST), "-o", str(target)]
        subprocess.run(command, check=True)
        return target

    return lambda tile, back=False: HostKernels(built(tile), tile, back)


def parted(x: Tensor) -> Tensor:
    """Of eight channels the even ones, then the odd ones; and [..., K] back from it."""
    return x.reshape(*x.shape[:-1], -1, 4, 2).transpose(-1, -2).flatten(-3)


def whole(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, 2, 4).transpose(-1, -2).flatten(-3)


def recipe(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 bytes in natural order and scale bytes, by torch: scales 2^ceil(log2(amax / 448))."""
    groups = x.float().reshape(*x.shape[:-1], -1, 128)
    power = torch.frexp(groups.abs().amax(-1).clamp_min(1e-4).double() / 448)
    exponent = torch.where(power.mantissa == 0.5, power.exponent - 1, power.exponent)
    q = (groups.double() * torch.exp2(-exponent.double())[..., None]).float()
    return q.to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8), (exponent + 127).byte()


def read(q: Tensor, scales: Tensor) -> Tensor:
    """float64 of e4m3 bytes in natural order."""
    step = torch.exp2(scales.double() - 127).masked_fill(scales == NAN, torch.nan)
    return q.view(torch.float8_e4m3fn).double() * step.repeat_interleave(128, -1)


def weights(g: torch.Generator, rows: int, k: int) -> Mx:
    packed = torch.randint(0, 256, (rows, k // 2), generator=g).to(torch.uint8)
    scales = torch.randint(112, 132, (rows, k // 32), generator=g).to(torch.uint8)
    return Mx(packed, scales)


def dense(weight: Mx) -> Tensor:
    nibbles = torch.stack((weight.elements & 15, weight.elements >> 4), -1).flatten(-2).long()
    sizes = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0).double()
    return sizes * torch.exp2(weight.scales.double() - 127).repeat_interleave(32, -1)


def sorted_by_expert(ids: Tensor, experts: int, m: int) -> tuple[Tensor, Tensor]:
    """What `plan.sorted_plan` gives; two blocks more than there are, and no pair in them."""
    flat = ids.flatten().tolist()
    order = [pair for e in range(experts) for pair, other in enumerate(flat) if other == e]
    table, first = [], 0
    for e in range(experts):
        left = flat.count(e)
        while left:
            table.append((e, first, min(left, m)))
            first, left = first + min(left, m), left - min(left, m)
    order += [2**30] * (len(flat) - len(order))  # nobody reads these
    table += [(2**30, 2**30, 0)] * 2
    return torch.tensor(order, dtype=torch.int32), torch.tensor(table, dtype=torch.int32)


def drawn(g: torch.Generator, counts: tuple[int, ...], tokens: int) -> Tensor:
    """ids [tokens, 2]: expert e of so many pairs, others -1."""
    flat = torch.full((2 * tokens,), -1, dtype=torch.int32)
    chosen = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)])
    flat[torch.randperm(2 * tokens, generator=g)[: len(chosen)]] = chosen.int()
    return flat.view(tokens, 2)


def hidden_of(x: Tensor, w: Tensor, ids: Tensor, routes: Tensor, limit: float) -> Tensor:
    """[pairs, F] float64; NaN for pairs of no expert. x [T, D], w [E, 2F, D]."""
    f = w.shape[1] // 2
    out = torch.full((ids.numel(), f), torch.nan, dtype=torch.float64)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            gate, up = torch.split(w[expert] @ x[pair // ids.shape[1]], f)
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[pair] = torch.nn.functional.silu(gate) * up * routes.flatten()[pair]
    return out


@pytest.mark.parametrize("back", [False, True])
def test_rounding_is_the_recipes_bit_for_bit(host: Any, back: bool) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(7, 640, generator=g) * torch.exp2(torch.randint(-30, 30, (7, 1), generator=g))
    x[1] = 0
    x[2, :128] = torch.arange(128) / 8 + 440  # near the border of a scale
    x[3, 128:256] = torch.tensor([448.0, 17.0, 19.0, -0.0]).repeat(32)  # ties
    x = x.bfloat16()
    want, scales = recipe(x[:, :512])
    x[5, 300], x[6, 5] = torch.inf, torch.nan
    got, got_scales = rounded(x[:, :512], host(MX_STREAM, back))  # rows 640 numbers apart
    sound = torch.ones(7, 4, dtype=torch.bool)
    sound[5, 2] = sound[6, 0] = False
    assert torch.equal(got_scales[sound], scales[sound])
    assert set(got_scales[~sound].tolist()) == {NAN}
    same = (whole(got) == want).view(7, -1, 128).all(-1)
    assert bool(same[sound].all())


def test_rows_that_no_load_of_four_can_read_are_copied() -> None:
    class Spy:
        tile, given = MX_STREAM, (0, 0)

        def launch(self, name: str, grid: int, *arguments: Any) -> None:
            self.given = (arguments[0].value, arguments[3].value)

    memory = torch.zeros(5 * 260, dtype=torch.bfloat16)
    for stride, begin, copied in ((260, 4, False), (256, 1, True), (258, 0, True)):
        x, spy = memory.as_strided((4, 256), (stride, 1), begin), Spy()
        rounded(x, spy)
        assert (spy.given != (x.data_ptr(), stride)) is copied
        assert spy.given[0] % 8 == 0 and spy.given[1] % 4 == 0


def test_parted_order() -> None:
    x = torch.arange(16)
    assert parted(x).tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert torch.equal(whole(parted(x)), x)


COUNTS = {8: (3, 0, 8, 11), 64: (20, 0, 3, 70)}
"""Pairs of each expert: less than half a tile, none, a tile and a part of another."""


@TILES
@pytest.mark.parametrize(("limit", "back"), [(0.0, False), (2.0, True)])
def test_up_is_clamped_gated_weighted_and_rounded(
    host: Any, tile: MxTile, limit: float, back: bool
) -> None:
    g = torch.Generator().manual_seed(11)
    counts, (d, f) = COUNTS[tile.m], (384 if tile.few else 256, 128)
    tokens = sum(counts) // 2 + 3
    ids = drawn(g, counts, tokens)
    routes = torch.rand(tokens, 2, generator=g)
    x = torch.randn(tokens, d, generator=g).bfloat16()
    w = weights(g, 4 * 2 * f, d)
    w.scales[2 * f : 4 * f] = NAN  # nobody chose expert 1
    run = host(tile, back)
    order, table = sorted_by_expert(ids, 4, tile.m)
    q, scales = rounded(x, run)
    out = torch.full((2 * tokens, f), 0x7F, dtype=torch.uint8)
    out_scales = torch.full((2 * tokens, f // 128), NAN, dtype=torch.uint8)
    tensors = (q, scales, order, table, routes, w.elements, w.scales, out, out_scales)
    call = Product(*(t.data_ptr() for t in tensors), limit or float("inf"), d, 2 * f, 2)
    run.launch("mx_up", len(table), call)
    want = hidden_of(read(*recipe(x)), dense(w).view(4, 2 * f, d), ids, routes, limit)
    live = sum(counts)
    want = want[order[:live].long()]
    bytes_, steps = recipe(want.bfloat16())
    assert torch.equal(out_scales[:live], steps)
    same = whole(out[:live]) == bytes_
    assert float(same.float().mean()) > 0.995  # float32 sums turn a rounding now and then
    error = (read(whole(out[:live]), steps) - want).abs()
    unit = torch.exp2(steps.double() - 127).repeat_interleave(128, -1)
    assert bool((error <= want.abs() * (2**-4 + 2**-8) + unit * 2**-9).all())
    assert bool((out[live:] == 0x7F).all() and (out_scales[live:] == NAN).all())


@TILES
@pytest.mark.parametrize("back", [False, True])
def test_down_against_float64(host: Any, tile: MxTile, back: bool) -> None:
    g = torch.Generator().manual_seed(12)
    counts, (k, n) = COUNTS[tile.m], (896 if tile.few else 640, 256)
    tokens = sum(counts) // 2 + 2
    ids = drawn(g, counts, tokens)
    w, live = weights(g, 4 * n, k), sum(counts)
    w.scales[n : 2 * n] = NAN
    w.scales[2 * n, 3], w.scales[2 * n + 9, 0] = NAN, 1  # seen, and 2^-126
    hidden = torch.randn(2 * tokens, k, generator=g) * 30
    hidden[live - 1, 128:256] *= 2.0**60
    q, scales = recipe(hidden)
    q[live:], scales[live:] = 0x7F, NAN
    q[0, 7], scales[1, 2] = 0x7F, NAN  # NaN beside a sound scale, and the other way round
    order, table = sorted_by_expert(ids, 4, tile.m)
    kind = torch.float32 if tile.few else torch.bfloat16
    out = torch.full((2 * tokens, n), 99.0, dtype=kind)
    given = parted(q).contiguous()
    tensors = (given, scales, order, table, order, w.elements, w.scales, out, scales)
    call = Product(*(t.data_ptr() for t in tensors), float("inf"), k, n, 2)
    host(tile, back).launch("mx_down", len(table), call)
    x = torch.full((2 * tokens, k), torch.nan, dtype=torch.float64)
    x[order[:live].long()] = read(q, scales)[:live]
    matrix = dense(w).masked_fill(w.scales.repeat_interleave(32, -1) == NAN, torch.nan)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert < 0:
            assert bool((out[pair] == 99).all())
            continue
        part = matrix[expert * n : (expert + 1) * n]
        want, size = part @ x[pair], part.abs() @ x[pair].abs()
        assert torch.equal(want.isnan(), out[pair].isnan())
        error = (out[pair].double() - want).abs().nan_to_num()
        allowed = size * (24 * 2.0**-24) + (0 if tile.few else want.abs() * 2.0**-8)
        assert bool((error <= allowed.nan_to_num()).all())


@TILES
def test_both_products_of_a_call(host: Any, tile: MxTile) -> None:
    g = torch.Generator().manual_seed(13)
    counts, (d, f) = (tile.m // 4, 3), (256, 128)
    tokens = sum(counts) // 2 + 2
    ids, routes = drawn(g, counts, tokens), torch.rand(tokens, 2, generator=g)
    x = torch.randn(tokens, d, generator=g).bfloat16()
    up, down = weights(g, 4 * f, d), weights(g, 2 * d, f)
    order, table = sorted_by_expert(ids, 2, tile.m)
    limit = 0.0 if tile.few else 10.0
    y = products(x, order, table, routes, up, down, limit, host(tile)).double()
    hidden = hidden_of(read(*recipe(x)), dense(up).view(2, 2 * f, d), ids, routes, limit)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            inner = read(*recipe(hidden[pair].bfloat16()[None]))[0]
            want = dense(down).view(2, d, f)[expert] @ inner
            assert float((y[pair] - want).norm() / want.norm()) < 2e-2


@TILES
def test_rows_that_were_rounded_ahead_give_the_same_bits(host: Any, tile: MxTile) -> None:
    """As `sent_rounded` makes them, by another order, and with a row of NaN and one with Inf."""
    g = torch.Generator().manual_seed(14)
    counts, (d, f) = (tile.m // 4, 3), (256, 128)
    tokens = sum(counts) // 2 + 2
    ids, routes = drawn(g, counts, tokens), torch.rand(tokens, 2, generator=g)
    x = torch.randn(tokens, d, generator=g) * torch.exp2(torch.arange(tokens) * 2.0 - 20)[:, None]
    x[0], x[1, 200] = 0, torch.nan
    x[2, 7] = torch.inf
    x, run = x.bfloat16(), host(tile)
    sent = sent_rounded(x, run)
    sound = torch.ones(tokens, d, dtype=torch.bool)
    sound[1, 128:] = sound[2, :128] = False
    assert torch.equal(sent.read()[sound].double(), read(*recipe(x))[sound])
    assert bool(sent.read()[~sound].isnan().all())
    up, down = weights(g, 4 * f, d), weights(g, 2 * d, f)
    order, table = sorted_by_expert(ids, 2, tile.m)

    def bits(rows: Any) -> Tensor:
        live = order[: sum(counts)].long()
        found = products(rows, order, table, routes, up, down, 10.0, run)[live]
        return found.view(torch.int32 if tile.few else torch.int16)

    came = replace(sent, elements=sent.elements.clone(), scales=sent.scales.clone())
    assert torch.equal(bits(x), bits(came))
    plain = torch.where(sound.all(1, keepdim=True), x, 1)
    assert torch.equal(bits(plain), bits(rounded_rows(plain, 128)))


class Combine:
    """`triton_combine.combine_kernel` by torch."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return self._run

    def _run(
        self, y: Tensor, ids: Tensor, shared: Tensor | None, out: Tensor, d: int, top: int, *_: Any,
        **__: Any,
    ) -> None:  # fmt: skip
        parts = y.float().view(-1, top, d).masked_fill((ids < 0)[..., None], 0).unbind(1)
        out.copy_(torch.stack(parts).sum(0))
        if shared is not None:
            out += shared


def test_the_ops_cases_pass_and_tell_a_wrong_kernel(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of many rows, as at the first start on a card."""
    (impl,) = (i for i in REGISTRY.impls() if i.id == "moe_experts/cuda-mxf8f6f4")
    facts, phases = target_facts("sm_120"), frozenset(Phase)
    cases = op_cases("moe_experts").FOREIGN["moe_experts"](0)
    assert all(applies(impl, case, "bfloat16", facts, phases) for case in cases)
    used: list[MxTile] = []

    class Kept(dict[MxTile, HostKernels]):
        def __missing__(self, tile: MxTile) -> HostKernels:
            used.append(tile)
            return host(tile)  # type: ignore[no-any-return]

    monkeypatch.setattr(cuda_experts, "kernels", lambda device, software: Kept())
    monkeypatch.setattr(cuda_experts, "sorted_plan", sorted_by_expert)
    monkeypatch.setattr(cuda_experts, "combine_kernel", Combine())
    for case in cases:
        verdict = check(impl, case, "bfloat16", "cpu", REGISTRY)
        assert verdict.accepted, [reason.message for reason in verdict.reasons]
    assert used == [MX_CHUNK] * 6  # rows as they are, rounded ahead, and given so

    def doubled(x: Any, run: Any) -> Any:
        found = sent_rounded(x, run)
        return replace(found, scales=2 * found.scales)

    with monkeypatch.context() as wrong:
        wrong.setattr(cuda_experts, "sent_rounded", doubled)
        (reason,) = check(impl, cases[-1], "bfloat16", "cpu", REGISTRY).reasons
        assert "rounded ahead give other numbers" in reason.message

    def unclamped(*args: Any) -> Tensor:
        return products(*(*args[:6], 0.0, args[7]))

    monkeypatch.setattr(cuda_experts, "products", unclamped)
    assert not check(impl, cases[-1], "bfloat16", "cpu", REGISTRY).accepted


def test_sizes_that_do_not_fit_are_refused(host: Any) -> None:
    run, none = host(MX_STREAM), torch.empty(0, 3, dtype=torch.int32)
    for d, f, kind in (
        (384, 128, torch.bfloat16),
        (256, 64, torch.bfloat16),
        (256, 128, torch.float),
    ):
        g = torch.Generator().manual_seed(0)
        with pytest.raises(InternalError, match="in tiles of 256"):
            products(
                torch.zeros(1, d, dtype=kind), none, none, torch.zeros(1, 1),
                weights(g, 2 * f, d), weights(g, d, f), 0.0, run,
            )  # fmt: skip


def test_the_tile_follows_the_pairs_of_an_expert() -> None:
    assert mx_for(8 * 256, 256) == MX_STREAM and mx_for(8 * 256 + 1, 256) == MX_CHUNK


def test_a_compiler_without_the_target_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    asked = []

    def build(source: cubin.Source, arch: str) -> tuple[None, Any, str]:
        asked.append((arch, source.defines[-1] == "-DMX_SOFTWARE=1"))
        return None, reject("compiler", "too old for it"), ""

    monkeypatch.setattr(cubin, "build", build)
    for software in (0, 1):
        with pytest.raises(CudaError, match="too old for it"):
            cuda_experts.CardKernels(MX_CHUNK, 0, software)
    assert asked == [("sm_120a", False), ("sm_120", True)]
