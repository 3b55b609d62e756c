"""``stored@1`` gives back what the checkpoint holds, bit for bit, and its recipe is DeepSeek's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_oracle import product, rounded, weight_of
from torch import Tensor

from metainfer.core.errors import InternalError, ModelError
from metainfer.core.step import Phase
from metainfer.formats.block_codecs import BlockTensor, decode
from metainfer.formats.blocks import FORMATS
from metainfer.formats.quant import RawTensor, dequantise, quantise, scheme_name
from metainfer.kernels.impl import Context, OpRequest
from metainfer.ops.catalog import builtin_registry
from metainfer.ops.embed.torch_embed import embed_stored
from metainfer.ops.linear import stored, torch_dense, torch_stored
from metainfer.ops.linear.onednn_layout import pack as pack_onednn
from metainfer.ops.linear.packed import PackedWeight, pack_dense
from metainfer.ops.linear.rounding import activation_group, round_activations
from metainfer.ops.out_group.torch_group import out_group_stored
from metainfer.platform.machine_catalog import find_machine

FP8 = ("fp8_128", "fp8_32", "fp8_128_f32")
REGISTRY = builtin_registry()


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_tensor(name: str, n: int, k: int, seed: int) -> BlockTensor:
    """Any bytes but NaN: every element, scales from the smallest to the largest."""
    fmt, g = FORMATS[name], torch.Generator().manual_seed(seed)
    data = torch.randint(256, fmt.data_shape(n, k), generator=g).to(torch.uint8)
    if fmt.element == "e4m3":
        data[(data & 0x7F) == 0x7F] = 0
    shape = fmt.scale_shape(n, k)
    if fmt.scale == "F32":
        scale = torch.exp2(torch.randint(-30, 30, shape, generator=g).float()) * 1.37
    elif fmt.scale == "F8_E8M0":
        scale = torch.randint(97, 157, shape, generator=g).to(torch.uint8)
        scale.view(-1)[:2] = torch.tensor([0, 240], dtype=torch.uint8)[: scale.numel()]
    else:
        scale = torch.randint(0x7F, shape, generator=g).to(torch.uint8)
    second = None if fmt.second == "none" else torch.tensor(0.0371 * (1 + seed % 3))
    return BlockTensor(fmt, (n, k), data, scale, second)


def packed(raws: list[BlockTensor], dtype: torch.dtype = torch.float32) -> PackedWeight:
    return stored.pack(raws, None, dtype=dtype)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(FORMATS)), st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.integers(1, 150), st.integers(0, 2**20), st.data(),
)  # fmt: skip
def test_values_are_the_codecs(
    name: str, rows: list[int], half: int, seed: int, data: st.DataObject
) -> None:
    """Whole, by tiles of any size, by part and by row; blocks never reach across tensors."""
    raws = [random_tensor(name, n, 2 * half, seed + i) for i, n in enumerate(rows)]
    want = torch.cat([decode(raw) for raw in raws])
    weight = packed(raws)
    assert torch.equal(stored.matrix(weight, torch.float32), want)
    most = data.draw(st.integers(1, 40_000))
    tiles = list(stored.tiles(weight, most))
    assert torch.equal(torch.cat([tile for _, tile in tiles]), want)
    assert [row for row, _ in tiles] == sorted({row for row, _ in tiles})
    for index, raw in enumerate(raws):
        assert torch.equal(stored.part(weight, index), decode(raw))
    one = packed(raws[:1], torch.bfloat16)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows[0] - 1), max_size=5)), dtype=int)
    got = embed_stored(ids, one)
    assert got.dtype == torch.bfloat16 and torch.equal(got, decode(raws[0]).bfloat16()[ids])


def test_tensors_that_begin_at_an_odd_byte(seed: int) -> None:
    """Bytes are looked up in pairs, which must not stand across a pair of the storage."""
    raws = [random_tensor("mxfp4", n, 2, seed % 1000 + n) for n in (3, 4, 1)]
    weight = packed(raws)
    for index, raw in enumerate(raws):
        assert torch.equal(stored.part(weight, index), decode(raw))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_codecs_are_the_oracle_s(name: str, seed: int) -> None:
    tensor = random_tensor(name, 70, 96, seed % 1000)
    assert torch.equal(decode(tensor).double(), weight_of(tensor))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_damaged_block_stays_visible(name: str, seed: int) -> None:
    tensor = random_tensor(name, 40, 64, seed % 1000)
    tensor.scale[0, 0] = float("nan") if tensor.format.scale == "F32" else 255
    got = stored.matrix(packed([tensor]), torch.float32)
    rows, columns = min(tensor.format.block[0], 40), min(tensor.format.block[1], 64)
    assert got[:rows, :columns].isnan().all() and got.isnan().sum() == rows * columns


def test_one_matrix_has_one_format(seed: int) -> None:
    tensor = random_tensor("fp8_128", 4, 64, seed % 1000)
    plain = RawTensor("BF16", (4, 64), noise(seed, 4, 64).bfloat16())
    with pytest.raises(ModelError, match=r"linear\.wqkv mixes BF16 and fp8_128") as caught:
        stored.pack([tensor, plain], None, dtype=torch.bfloat16, site="linear.wqkv")
    assert caught.value.code == "mixed_formats" and "dense@1" in str(caught.value.remedy)
    joined = pack_dense([tensor, plain], dtype=torch.float32)  # which decodes, takes both
    assert torch.equal(joined.data["weight"], torch.cat((decode(tensor), plain.data.float())))
    blocks = quantise(noise(seed, 4, 64), "Q8_0")
    with pytest.raises(InternalError, match="does not hold Q8_0"):
        stored.pack([blocks], None, dtype=torch.float32)
    other = random_tensor("fp8_128", 4, 32, 1)
    with pytest.raises(ModelError, match="cannot be joined"):
        stored.pack([tensor, other], None, dtype=torch.float32)


@pytest.mark.parametrize("scheme", ["F32", "BF16", "F16", *sorted(FORMATS)])
@pytest.mark.parametrize(
    "layout_id", ["dense@1", "onednn-f32@1", "stored@1", "experts-dense@1", "experts-stored@1"]
)
def test_the_ledger_s_bytes_are_those_held(scheme: str, layout_id: str, seed: int) -> None:
    layout = REGISTRY.layout(layout_id)
    assert layout.schemes is not None
    if scheme not in layout.schemes:
        assert layout_id == "experts-stored@1" and scheme not in FORMATS
        return
    raws: list[RawTensor | BlockTensor] = []
    for n in (130, 130 if layout.role == "experts" else 40):
        if scheme in FORMATS:
            raws.append(random_tensor(scheme, n, 96, seed % 1000))
        else:
            kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
            raws.append(RawTensor(scheme, (n, 96), noise(seed, n, 96).to(kinds[scheme])))
    if layout_id == "onednn-f32@1":  # a blocked weight does not tell its size; an embedding does
        weight = pack_onednn(raws, site="embed")
    else:
        weight = layout.resolve()(raws, None, dtype=torch.float32, device="cpu", site="linear.x")
    assert scheme_name(raws[0]) == scheme
    each = layout.nbytes or (lambda _, n, k: 4 * n * k)
    assert weight.nbytes == sum(each(scheme, *raw.shape) for raw in raws)


def test_decoding_at_load_rounds_once(seed: int) -> None:
    tensor = random_tensor("fp8_128_f32", 9, 64, seed % 1000)
    assert torch.equal(dequantise(tensor, torch.bfloat16), decode(tensor).bfloat16())
    assert torch.equal(dequantise(tensor, torch.float64), decode(tensor).double())


# ---- the recipe ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from([*FP8, "mxfp4", "nvfp4"]), st.integers(0, 4), st.integers(1, 5),
    st.integers(1, 150), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**20),
)  # fmt: skip
def test_linear_is_the_published_product(
    name: str, rows: int, n: int, half: int, dtype: torch.dtype, seed: int
) -> None:
    raws = [random_tensor(name, n, 2 * half, seed), random_tensor(name, n + 2, 2 * half, seed + 1)]
    for raw in raws:  # scales near each other: a sum of 2^30 and 2^-30 would hide the small ones
        raw.scale.clamp_(120, 130) if raw.scale.dtype == torch.uint8 else raw.scale.fill_(0.73)
    x = (noise(seed, rows, 2 * half) * 5).to(dtype)
    group = 32 if name == "fp8_32" else 128
    want = product(x, raws, group)
    weight = packed(raws, dtype)
    got = torch_stored.linear_f32(x, weight)
    assert got.dtype == torch.float32
    size = rounded(x, group).abs() @ torch.cat([weight_of(w) for w in raws]).abs().T
    assert ((got - want).abs() <= 1e-6 * size + 1e-30).all()
    short = torch_stored.linear(x, weight)
    assert short.dtype == dtype and torch.equal(short, got.to(dtype))


def test_the_bias_is_added_before_the_rounding(seed: int) -> None:
    tensor = random_tensor("fp8_128", 6, 64, seed % 1000)
    bias, x = noise(seed, 6).bfloat16(), noise(seed + 1, 3, 64).bfloat16()
    weight = stored.pack([tensor], bias.float(), dtype=torch.bfloat16)
    free = stored.pack([tensor], None, dtype=torch.bfloat16)
    want = torch_stored.linear_f32(x, free) + bias.float()
    assert torch.equal(torch_stored.linear_f32(x, weight), want)
    assert torch.equal(torch_stored.linear(x, weight), want.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_plain_weights_round_no_activation(dtype: torch.dtype, seed: int) -> None:
    values = noise(seed, 10, 64)
    for scheme, kind in (("BF16", torch.bfloat16), ("F32", torch.float32)):
        raw = RawTensor(scheme, (10, 64), values.to(kind))
        held = stored.pack([raw], None, dtype=dtype)
        assert held.data["weight"].dtype == kind
        dense = pack_dense([raw], dtype=dtype)
        x = noise(seed + 1, 5, 64).to(dtype)
        assert torch.equal(torch_stored.linear(x, held), torch_dense.linear(x, dense))
        want = torch_dense.linear_f32(x, dense)
        torch.testing.assert_close(torch_stored.linear_f32(x, held), want, rtol=1e-6, atol=1e-6)
        assert want.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_linear_f32_multiplies_in_float32(seed: int) -> None:
    """In a bfloat16 model: as exact as float32, where `linear` has bfloat16's error."""
    raw = RawTensor("BF16", (300, 64), noise(seed, 300, 64).bfloat16())
    dense, x = pack_dense([raw], dtype=torch.bfloat16), noise(seed + 1, 7, 64).bfloat16()
    want = x.double() @ raw.data.double().T
    assert (torch_dense.linear_f32(x, dense) - want).abs().max() < 2e-5
    assert (torch_dense.linear(x, dense) - want).abs().max() > 1e-3


class OnCard(torch.Tensor):
    """A tensor of the host that says it is on a card."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_f32_of_float16_is_widened_on_a_card(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix unit cuts the 22 bits of its products; bfloat16's 16 come whole."""
    given: list[torch.dtype] = []

    def library(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        given.append(a.dtype)
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(torch, "mm", library)
    dense = pack_dense([RawTensor("F32", (30, 64), noise(seed, 30, 64).float())], dtype=dtype)
    x = noise(seed + 1, 7, 64).to(dtype)
    got = torch_dense.linear_f32(x.as_subclass(OnCard), dense)
    want = x.double() @ dense.data["weight"].double().T
    assert got.dtype == torch.float32 and (got - want).abs().max() < 2e-5
    assert given == [torch.bfloat16] * (dtype == torch.bfloat16)


def test_linear_f32_of_float16_costs_what_the_reference_does_on_a_card() -> None:
    """Both widen, so neither is a fast path."""
    shape = {"rows": 32, "n": 1024, "k": 4096}
    impls = {impl.name: impl for impl in REGISTRY.of("linear_f32")}

    def cost(name: str, dtype: str) -> float:
        request = OpRequest("linear_f32", "linear_f32", Phase.DECODE, dtype, shape)
        priced = impls[name].cost
        assert priced is not None
        seconds = priced(Context(request, find_machine("1x-h200").facts))
        assert seconds is not None
        return seconds

    assert cost("torch", "float16") == cost("ref", "float16")
    assert cost("torch", "bfloat16") < cost("ref", "bfloat16")


def test_out_group_rounds_weights_but_no_activation(seed: int) -> None:
    tensor = random_tensor("fp8_128_f32", 32, 64, seed % 1000)
    tensor.scale.fill_(0.731)
    o = noise(seed, 3, 4, 32).bfloat16()
    got = out_group_stored(o, packed([tensor], torch.bfloat16), groups=2)
    matrix = decode(tensor).bfloat16().float().view(2, 16, 64)
    want = torch.einsum("tgk,grk->tgr", o.float().view(3, 2, 64), matrix).flatten(1)
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-7 * want.abs().max())


def test_activations_keep_tokens_and_groups_apart(seed: int) -> None:
    """A huge channel costs its own token's group its precision, nothing else."""
    x = noise(seed, 2, 300)
    base = round_activations(x, 128)
    x[0, 5] = 1e6
    after = round_activations(x, 128)
    assert torch.equal(after[1], base[1]) and torch.equal(after[0, 128:], base[0, 128:])
    assert (after[0, :5] == 0).all() and after[0, 5] == 2.0**12 * 240


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from([32, 128]), st.integers(0, 2**20))
def test_activation_rounding_with_a_short_last_group(
    rows: int, k: int, group: int, seed: int
) -> None:
    x = noise(seed, rows, k) * torch.exp2(noise(seed + 1, rows, 1) * 12)
    assert torch.equal(round_activations(x, group).double(), rounded(x, group))


def test_groups_follow_the_weights() -> None:
    groups = {name: activation_group(FORMATS[name]) for name in FORMATS}
    assert groups == {
        "fp8_128": 128, "fp8_32": 32, "fp8_row_32": 32, "fp8_128_f32": 128,
        "mxfp4": 128, "nvfp4": 128, "nvfp4_compressed": 128,
    }  # fmt: skip
