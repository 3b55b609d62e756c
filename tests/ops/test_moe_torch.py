"""Experts and routers in torch: against their references, the published arithmetic and ties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_oracle import product
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.formats.block_codecs import BlockTensor, encode
from metainfer.formats.blocks import FORMATS
from metainfer.formats.quant import RawTensor
from metainfer.ops.linear import stored
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.rounding import round_activations
from metainfer.ops.moe_experts import torch_experts
from metainfer.ops.moe_experts.layouts import pack_dense, pack_stored
from metainfer.ops.moe_experts.ref import moe_experts, moe_experts_rounded
from metainfer.ops.moe_route import ref as route_ref
from metainfer.ops.moe_route import torch_route

NAN = float("nan")


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routing(seed: int, rows: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    picks = [torch.randperm(experts, generator=g)[:k] for _ in range(rows)]
    ids = torch.stack(picks).int() if picks else torch.empty(0, k, dtype=torch.int32)
    ids[torch.rand(rows, k, generator=g) < 0.2] = -1
    return ids, torch.softmax(noise(seed + 1, rows, k), -1) * 1.5


def block_experts(
    name: str, experts: int, d: int, f: int, seed: int
) -> tuple[list[BlockTensor], list[BlockTensor]]:
    """w1, w3 of each expert in turn, and w2."""
    fmt = FORMATS[name]
    up = [encode(noise(seed + e, f, d) * d**-0.5, fmt) for e in range(2 * experts)]
    return up, [encode(noise(seed - 1 - e, d, f) * f**-0.5, fmt) for e in range(experts)]


def published(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: list[BlockTensor],
    down: list[BlockTensor],
    limit: float,
    group: int,
) -> tuple[Tensor, Tensor]:
    """One token and one expert at a time in float64: the result, and the size of its terms."""
    want = torch.zeros(x.shape, dtype=torch.float64)
    size = torch.zeros_like(want)
    for t in range(x.shape[0]):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if expert < 0:
                continue
            row = x[t : t + 1]
            gate = product(row, [up[2 * expert]], group)
            value = product(row, [up[2 * expert + 1]], group)
            if limit:
                gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
            hidden = gate / (1 + torch.exp(-gate)) * value * weight
            part = product(hidden, [down[expert]], group)
            want[t] += part[0]
            size[t] += hidden.abs().max()
    return want, size


@settings(max_examples=25)
@given(
    st.sampled_from(["mxfp4", "nvfp4", "fp8_128", "fp8_32"]), st.integers(0, 5), st.integers(1, 4),
    st.integers(1, 70), st.integers(1, 20), st.sampled_from([0.0, 0.5, 10.0]),
    st.integers(0, 2**20), st.data(),
)  # fmt: skip
def test_recipe_is_the_published_arithmetic(
    name: str, rows: int, experts: int, d: int, f: int, limit: float, seed: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """In float64, where no rounding to e4m3 can turn; widths below and above a group."""
    d, f = 2 * d, 2 * f
    k = data.draw(st.integers(1, experts))
    x = noise(seed, rows, d).double() * 3
    ids, weights = routing(seed, rows, experts, k)
    up, down = block_experts(name, experts, d, f, seed)
    w13, w2 = pack_stored(up, dtype=torch.float64), pack_stored(down, dtype=torch.float64)
    got = torch_experts.recipe(x, ids, weights.double(), w13, w2, limit=limit)
    group = 32 if name == "fp8_32" else 128
    want, size = published(x, ids, weights.double(), up, down, limit, group)
    assert got.dtype == torch.float64
    assert ((got - want).abs() <= 1e-9 * (want.abs() + size) + 1e-30).all()


@settings(max_examples=40)
@given(
    st.integers(0, 9), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from([0.0, 0.5, 10.0]), st.integers(0, 2**20), st.data(),
)  # fmt: skip
def test_dense_is_the_reference(
    rows: int, experts: int, d: int, f: int, limit: float, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, experts))
    ids, weights = routing(seed, rows, experts, k)
    x = noise(seed, rows, d).double()
    idle = [e for e in range(experts) if not bool((ids == e).any())]
    up, down = noise(seed, experts, 2 * f, d).double(), noise(seed, experts, d, f).double()
    up[idle], down[idle] = NAN, NAN
    w13, w2 = (held(t.flatten(0, 1)) for t in (up, down))
    got = torch_experts.dense(x, ids, weights, w13, w2, limit=limit)
    want = moe_experts(x, ids, weights, w13, w2, limit=limit)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    assert torch.equal(got[(ids < 0).all(dim=1)], torch.zeros_like(got[(ids < 0).all(dim=1)]))


def held(matrix: Tensor) -> PackedWeight:
    return PackedWeight("experts-dense@1", (matrix.shape[0], matrix.shape[1]), {"weight": matrix})


@settings(max_examples=30)
@given(
    st.sampled_from(["mxfp4", "fp8_32"]), st.integers(0, 5), st.integers(1, 150),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans(),
    st.integers(0, 2**20),
)  # fmt: skip
def test_rows_that_come_rounded_give_the_same_bits(
    name: str, rows: int, d: int, dtype: torch.dtype, broken: bool, seed: int
) -> None:
    """Widths below, at and above a group; a group with NaN or infinity; what they read back as."""
    d = 2 * d
    x = (noise(seed, rows, d) * torch.exp2(8 * noise(seed + 1, rows, d))).to(dtype)
    if broken and rows:
        x[0, 0], x[-1, -1] = NAN, float("inf")
    ids, weights = routing(seed, rows, 3, 2)
    up, down = block_experts(name, 3, d, 32, seed)
    w13, w2 = pack_stored(up, dtype=dtype), pack_stored(down, dtype=dtype)
    sent = torch_experts.rounded(x, w13)
    assert sent.elements.dtype == torch.float8_e4m3fn and sent.shape == x.shape
    group = 32 if name == "fp8_32" else 128
    assert torch.equal(as_bytes(sent.read()), as_bytes(round_activations(x, group)))
    for experts in (torch_experts.recipe, moe_experts_rounded):
        if experts is moe_experts_rounded:
            w13, w2 = (as_held(each, dtype) for each in (w13, w2))
        found, given = (experts(each, ids, weights, w13, w2, limit=1.0) for each in (sent, x))
        assert found.dtype == dtype and torch.equal(as_bytes(found), as_bytes(given))


def as_bytes(x: Tensor) -> Tensor:
    """Bits, but for the sign and payload of NaN."""
    return torch.where(x.isnan(), torch.zeros_like(x), x).view(torch.uint8)


def as_held(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """Experts as stored, read into `dtype` for the reference."""
    matrix = torch.cat([stored.part(weight, i) for i in range(len(weight.parts))]).to(dtype)
    return replace(held(matrix), format=weight.format)


def test_experts_that_nobody_chose_are_not_decoded(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, down = block_experts("mxfp4", 5, 64, 32, seed % 1000)
    w13, w2 = (pack_stored(raws, dtype=torch.float32) for raws in (up, down))
    asked: list[int] = []
    decode = stored.part

    def counted(weight: PackedWeight, index: int) -> Tensor:
        if weight is w2:
            asked.append(index)
        return decode(weight, index)

    monkeypatch.setattr(torch_experts, "part", counted)
    ids = torch.tensor([[4, 1], [1, -1], [-1, -1]], dtype=torch.int32)
    torch_experts.recipe(noise(seed, 3, 64), ids, torch.ones(3, 2), w13, w2, limit=1.0)
    assert asked == [1, 4]


def test_a_row_of_nan_stays_alone(seed: int, poison: None) -> None:
    """A padded row may hold anything."""
    up, down = block_experts("nvfp4", 3, 64, 32, seed % 1000)
    w13, w2 = (pack_stored(raws, dtype=torch.float32) for raws in (up, down))
    x, ids = noise(seed, 4, 64), torch.tensor([[0, 2], [1, 2], [0, 1], [-1, -1]])
    base = torch_experts.recipe(x, ids, torch.ones(4, 2), w13, w2, limit=1.0)
    x[1], x[3] = NAN, NAN
    got = torch_experts.recipe(x, ids, torch.ones(4, 2), w13, w2, limit=1.0)
    assert got[1].isnan().all() and torch.equal(got[3], torch.zeros(64))
    torch.testing.assert_close(got[[0, 2]], base[[0, 2]])


def test_layouts_hold_experts_as_stored(seed: int) -> None:
    """GPU kernels read elements and scales expert by expert."""
    up, _ = block_experts("mxfp4", 3, 128, 64, seed % 1000)
    w13 = pack_stored(up, dtype=torch.bfloat16, site="experts.w13")
    assert w13.layout == "experts-stored@1" and w13.shape == (3 * 2 * 64, 128)
    assert w13.data["elements"].view(3, 2, 64, 64)[1, 1].equal(up[3].data)
    assert w13.data["scales"].view(3, 2, 64, 4)[2, 0].equal(up[4].scale)
    dense = pack_dense(up, dtype=torch.bfloat16)
    assert dense.layout == "experts-dense@1"
    assert dense.data["weight"].dtype == torch.bfloat16 and dense.shape == w13.shape
    with pytest.raises(ModelError, match=r"experts of w13 have \[4, 6\] rows"):
        uneven = [encode(noise(seed, n, 64), FORMATS["mxfp4"]) for n in (4, 6)]
        pack_stored(uneven, dtype=torch.float32, site="w13")
    with pytest.raises(ModelError, match="mixes BF16 and mxfp4"):
        plain = RawTensor("BF16", (64, 128), noise(seed, 64, 128).bfloat16())
        pack_stored([up[0], plain], dtype=torch.float32)


# ---- routers -------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(st.integers(0, 5), st.integers(1, 12), st.integers(0, 2**20), st.data())
def test_routes_with_many_ties_are_the_reference_s(
    rows: int, experts: int, seed: int, data: st.DataObject
) -> None:
    """Few distinct sums, negative and zero ones among them: the lower expert wins a tie."""
    g = torch.Generator().manual_seed(seed)
    top_k = data.draw(st.integers(1, experts))
    gate = torch.randint(-1, 2, (experts, 3), generator=g).float()
    bias = torch.randint(-3, 2, (experts,), generator=g).float() * 0.75
    x = torch.randint(-1, 2, (rows, 3), generator=g).float()
    ids, weights = torch_route.moe_route(x, gate, bias, top_k=top_k, scale=1.5)
    want = route_ref.moe_route(x, gate, bias, top_k=top_k, scale=1.5)
    assert ids.dtype == torch.int32 and torch.equal(ids, want[0])
    torch.testing.assert_close(weights, want[1], rtol=1e-6, atol=1e-7)


@settings(max_examples=60)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9), st.data())
def test_highest_is_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    """Any floats: infinities, subnormals, both zeros."""
    count = data.draw(st.integers(1, len(values)))
    row = torch.tensor([values])
    want = torch.sort(row, dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(torch_route._highest(row, count), want)
    assert torch.equal(torch_route._highest(row.double(), count), want)


def test_softplus_is_exact_above_twenty(seed: int) -> None:
    """The usual cut-off is off by 2e-9 there: visible in float64."""
    x = torch.full((1, 1), 21.0, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    got = torch_route._scores(x, one)
    want = torch.log1p(torch.exp(x)).sqrt()
    assert torch.equal(got, want) and got != x.sqrt()
    far = torch_route._scores(torch.full((1, 1), 900.0), one)
    assert far == torch.tensor(900.0).sqrt()


def test_hash_routes_follow_the_token(seed: int) -> None:
    x, gate = noise(seed, 4, 8), noise(seed + 1, 6, 8)
    table = torch.tensor([[0, 5], [3, 1], [2, 4]])
    tokens = torch.tensor([2, 0, 0, 1])
    ids, weights = torch_route.moe_route_hash(x, gate, table, tokens, scale=2.0)
    assert ids.tolist() == [[2, 4], [0, 5], [0, 5], [3, 1]] and ids.dtype == torch.int32
    want = route_ref.moe_route_hash(x, gate, table, tokens, scale=2.0)[1]
    torch.testing.assert_close(weights, want)
    torch.testing.assert_close(weights.sum(1), torch.full((4,), 2.0))


def test_a_router_in_bfloat16_scores_in_float32(seed: int) -> None:
    x, gate = noise(seed, 5, 64).bfloat16(), noise(seed + 1, 8, 64)
    ids, weights = torch_route.moe_route(x, gate, torch.zeros(8), top_k=3, scale=1.0)
    want = route_ref.moe_route(x.double(), gate.double(), torch.zeros(8), top_k=3, scale=1.0)
    assert weights.dtype == torch.float32 and torch.equal(ids, want[0])
    torch.testing.assert_close(weights.double(), want[1], rtol=1e-5, atol=1e-6)
