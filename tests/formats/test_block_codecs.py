"""Reference encoders and decoders: against transformers, brute force, and the recipes' rules."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.formats import blocks, elements
from metainfer.formats.block_codecs import (
    BlockTensor,
    block_scales,
    check_scales,
    decode,
    encode,
    from_stored,
)
from metainfer.formats.blocks import FORMATS, FP8_32, FP8_128, FP8_128_F32, MXFP4, NVFP4

ALL = list(FORMATS.values())
BOTH = [torch.float32, torch.float64]


def values_of(n: int, k: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = torch.randn(n, k, generator=generator)
    return shape * torch.exp2(spread * torch.randn(n, 1, generator=generator))


def random_codes(fmt: blocks.BlockFormat, n: int, k: int, seed: int) -> BlockTensor:
    """Any finite bytes."""
    generator = torch.Generator().manual_seed(seed)

    def some(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    data, scale = some(fmt.data_shape(n, k)), some(fmt.scale_shape(n, k))
    if fmt.element == "e4m3":
        data[(data & 127) == 127] = 0
    if fmt.scale == "F8_E8M0":
        scale = 100 + scale % 50
    elif fmt.scale == "F32":
        scale = torch.rand(scale.shape, generator=generator)
    else:
        scale = scale % 127
    second = None if fmt.second == "none" else torch.tensor(0.37)
    return BlockTensor(fmt, (n, k), data, scale, second)


def slow_scale(tensor: BlockTensor, row: int, column: int) -> float:
    """A block's multiplier from its stored bytes, by the formats' definitions."""
    stored = tensor.scale[row, column].item()
    if tensor.format.scale == "F32":
        return stored
    if tensor.format.scale == "F8_E8M0":
        return 2.0 ** (stored - 127)
    exponent, mantissa = int(stored) >> 3 & 15, int(stored) & 7
    value = (mantissa / 8 if exponent == 0 else 1 + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)
    assert tensor.second is not None
    second = tensor.second.item()
    return value * second if tensor.format.second == "multiply" else value / second


def slow_decode(tensor: BlockTensor) -> list[list[float]]:
    """Element by element, in Python floats."""
    fmt, (n, k) = tensor.format, tensor.shape
    data = tensor.data.tolist()
    rows = []
    for i in range(n):
        row = []
        for j in range(k):
            if fmt.element == "e4m3":
                value = float(elements.e4m3_decode(torch.tensor([data[i][j]], dtype=torch.uint8)))
            else:
                nibble = data[i][j // 2] >> (4 * (j % 2)) & 15
                value = float(elements.e2m1_decode(torch.tensor([nibble])))
            row.append(value * slow_scale(tensor, i // fmt.block[0], j // fmt.block[1]))
        rows.append(row)
    return rows


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("n", "k"), [(1, 2), (33, 34), (5, 62)])
def test_decoding_is_element_times_scale_of_its_block(
    fmt: blocks.BlockFormat, n: int, k: int, seed: int
) -> None:
    tensor = random_codes(fmt, n, k, seed)
    assert decode(tensor, torch.float64).tolist() == slow_decode(tensor)
    assert decode(tensor).dtype == torch.float32


@pytest.mark.parametrize("fmt", [FP8_32, FP8_128, FP8_128_F32, MXFP4], ids=lambda fmt: fmt.name)
def test_decoding_equals_transformers(fmt: blocks.BlockFormat, seed: int) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensor = random_codes(fmt, 256, 384, seed)
    theirs = Fp8Dequantize(None)
    data = tensor.data.view(torch.int8 if fmt.element == "e2m1" else torch.float8_e4m3fn)
    expected = theirs._dequantize_one(data, tensor.scale, torch.float32)
    assert torch.equal(decode(tensor), expected)
    if fmt.scale == "F8_E8M0":
        typed = tensor.scale.view(torch.float8_e8m0fnu)
        assert torch.equal(decode(tensor), theirs._dequantize_one(data, typed, torch.float32))
        assert torch.equal(decode(from_stored(fmt, data, typed)), expected)


def test_mxfp4_equals_transformers_gpt_oss_reader(seed: int) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensor = random_codes(MXFP4, 6, 128, seed)
    packed = tensor.data.reshape(1, 6, 4, 16)
    theirs = convert_moe_packed_tensors(packed, tensor.scale[None], dtype=torch.float32)
    assert torch.equal(decode(tensor), theirs[0].T.contiguous())


def test_block_fp8_encoding_equals_transformers(seed: int) -> None:
    """Up to its float32 detour, 1 / (448 / amax) and log2, which can miss a boundary."""
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="ue8m0")
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config))
    values = values_of(256, 384, seed)
    result = theirs._quantize_one("a.weight", values)
    ours = encode(values, FP8_128)
    assert torch.equal(ours.scale, result["a.weight_scale_inv"].view(torch.uint8))
    assert torch.equal(ours.data, result["a.weight"].view(torch.uint8))


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@settings(max_examples=10)
@given(n=st.integers(1, 40), half=st.integers(1, 40), at=st.integers(0, 2**31))
def test_encoding_picks_the_nearest_value(
    fmt: blocks.BlockFormat, n: int, half: int, at: int
) -> None:
    """Given the scales, no other code is nearer, and the error is within half a step."""
    values = values_of(n, 2 * half, at).double()
    tensor = encode(values, fmt)
    scales = block_scales(tensor, torch.float64)
    full = scales.repeat_interleave(fmt.block[0], 0)[:n]
    full = full.repeat_interleave(fmt.block[1], 1)[:, : 2 * half]
    if fmt.element == "e4m3":
        grid = elements.e4m3_decode(torch.arange(256, dtype=torch.uint8), torch.float64)
        grid = grid[torch.isfinite(grid)]
    else:
        grid = elements.e2m1_decode(torch.arange(16), torch.float64)
    error = (decode(tensor, torch.float64) - values).abs()
    best = (grid * full[..., None] - values[..., None]).abs().amin(-1)
    assert torch.allclose(error, best, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("fmt", [FP8_32, FP8_128, MXFP4, FP8_128_F32], ids=lambda fmt: fmt.name)
def test_the_scale_is_the_smallest_that_holds_the_block(
    fmt: blocks.BlockFormat, dtype: torch.dtype, seed: int
) -> None:
    largest = blocks.ELEMENT_MAX[fmt.element]
    values = values_of(200, 200, seed, 8.0).to(dtype)
    scales = block_scales(encode(values, fmt), torch.float64)
    for row, column in product(range(scales.shape[0]), range(scales.shape[1])):
        r, c = fmt.block
        block = values[row * r : row * r + r, column * c : column * c + c]
        amax, scale = float(block.abs().max()), float(scales[row, column])
        assert math.frexp(scale)[0] == 0.5
        assert amax <= largest * scale and amax > largest * scale / 2


def test_fp32_scales_need_not_be_powers_of_two(seed: int) -> None:
    values = values_of(130, 70, seed)
    tensor = encode(values, FP8_128_F32, power_of_two=False)
    assert torch.equal(tensor.scale[0, 0], values[:128].abs().max() / 448)
    error = (decode(tensor) - values).abs() / values.abs().clamp(min=1e-3)
    assert float(error[:128].median()) < 2**-4


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", BOTH)
def test_decoded_values_encode_to_themselves(
    fmt: blocks.BlockFormat, dtype: torch.dtype, seed: int
) -> None:
    first = encode(values_of(70, 66, seed).to(dtype), fmt)
    dense = decode(first, torch.float64)
    again = encode(dense, fmt, second=first.second)
    assert torch.equal(decode(again, torch.float64), dense)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", BOTH)
def test_zero_blocks_have_unit_scales(fmt: blocks.BlockFormat, dtype: torch.dtype) -> None:
    tensor = encode(torch.zeros(130, 130, dtype=dtype), fmt)
    assert (tensor.data == 0).all() and (tensor.scale == blocks.UNIT_SCALE[fmt.scale]).all()
    assert tensor.second is None or float(tensor.second) == 1.0
    assert (decode(tensor) == 0).all()
    check_scales(tensor, "zeros")


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_damage_stays_visible_and_inside_its_block(
    fmt: blocks.BlockFormat, damage: float, power_of_two: bool, seed: int
) -> None:
    values = values_of(140, 140, seed)
    values[3, 5] = damage
    dense = decode(encode(values, fmt, power_of_two=power_of_two))
    rows, columns = fmt.block
    assert torch.isnan(dense[:4, : min(columns, 140)]).any()
    inside = torch.zeros(140, 140, dtype=torch.bool)
    top = 3 // rows * rows
    inside[top : top + rows, :columns] = True
    assert torch.isnan(dense[inside]).all() and torch.isfinite(dense[~inside]).all()


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_extremes_saturate(fmt: blocks.BlockFormat) -> None:
    values = torch.zeros(2, 64, dtype=torch.float64)
    values[0, 0], values[1, 0] = 2.0**-149, 2.0**-140
    tiny = decode(encode(values.float(), fmt), torch.float64)
    assert torch.isfinite(tiny).all() and float(tiny.abs().max()) <= 2.0**-130
    huge = torch.full((2, 64), 1e300, dtype=torch.float64)
    tensor = encode(huge, fmt)
    assert torch.isfinite(decode(tensor, torch.float64)).all()
    if fmt.scale == "F8_E8M0":
        assert (tensor.scale == 254).all()
        assert float(decode(tensor, torch.float64)[0, 0]) == (
            blocks.ELEMENT_MAX[fmt.element] * 2.0**127
        )


def test_e8m0_255_poisons_its_block_only() -> None:
    tensor = encode(torch.ones(2, 96), MXFP4)
    tensor.scale[0, 1] = 255
    dense = decode(tensor)
    assert torch.isnan(dense[0, 32:64]).all() and int(torch.isnan(dense).sum()) == 32


@pytest.mark.parametrize("fmt", [NVFP4, blocks.NVFP4_COMPRESSED], ids=lambda fmt: fmt.name)
def test_nvfp4_follows_its_libraries(fmt: blocks.BlockFormat, seed: int) -> None:
    """amax/(6*448) per tensor, e4m3(amax/(6*scale_2)) per block, scales combined first."""
    values = values_of(12, 64, seed)
    tensor = encode(values, fmt)
    amax = values.abs().max()
    assert tensor.second is not None
    multiplier = tensor.second if fmt.second == "multiply" else 1 / tensor.second
    assert torch.allclose(multiplier, amax / (6 * 448), rtol=1e-6)
    wanted = values.reshape(12, 4, 16).abs().amax(-1) / (6 * multiplier)
    scale = elements.e4m3_decode(tensor.scale)
    assert torch.allclose(scale, wanted.clamp(min=2.0**-9), rtol=2**-4, atol=2.0**-10)
    assert float(scale.max()) == 448.0
    effective = scale * tensor.second if fmt.second == "multiply" else scale / tensor.second
    codes = elements.e2m1_decode(elements.e2m1_unpack(tensor.data))
    assert torch.equal(decode(tensor), codes * effective.repeat_interleave(16, 1))


@pytest.mark.parametrize("fmt", [NVFP4, blocks.NVFP4_COMPRESSED], ids=lambda fmt: fmt.name)
def test_nvfp4_scales_never_round_to_zero(fmt: blocks.BlockFormat) -> None:
    values = torch.zeros(1, 48)
    values[0, 0], values[0, 16] = 1.0, 1e-7
    assert encode(values, fmt).scale.tolist() == [[126, 1, 0x38]]


def test_the_two_nvfp4_namings_are_reciprocal(seed: int) -> None:
    tensor = encode(values_of(8, 64, seed), NVFP4, second=torch.tensor(0.125))
    other = BlockTensor(
        blocks.NVFP4_COMPRESSED, tensor.shape, tensor.data, tensor.scale, torch.tensor(8.0)
    )
    assert torch.equal(decode(tensor), decode(other))
    with pytest.raises(ModelError, match="second multiply against divide"):
        blocks.agree(tensor.format, other.format, "w1")


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_empty_matrices(fmt: blocks.BlockFormat) -> None:
    for n, k in ((0, 64), (3, 0), (0, 0)):
        assert decode(encode(torch.zeros(n, k), fmt)).shape == (n, k)


def test_b09_corrupted_scales_are_detected(seed: int) -> None:
    for fmt in ALL:
        check_scales(encode(values_of(64, 64, seed), fmt), "w1")
    tensor = encode(values_of(64, 64, seed), MXFP4)
    for byte in (255, 127 + 14):
        tensor.scale[7, 1] = byte
        with pytest.raises(ModelError, match=r"1 of 128 .*'w1'.* at \[7, 1\]"):
            check_scales(tensor, "w1")
    tensor.scale[7, 1] = 127 + 13
    check_scales(tensor, "w1")


@pytest.mark.parametrize("second", [0.0, -1.0, math.nan, math.inf])
def test_a_zero_second_scale_is_refused(second: float) -> None:
    tensor = encode(torch.ones(2, 32), NVFP4, second=torch.tensor(1.0))
    broken = BlockTensor(NVFP4, tensor.shape, tensor.data, tensor.scale, torch.tensor(second))
    with pytest.raises(ModelError, match="w1") as caught:
        check_scales(broken, "w1")
    assert caught.value.code == "bad_scale"


def test_what_does_not_fit_is_refused() -> None:
    data = torch.zeros(2, 32, dtype=torch.uint8)
    scale = torch.zeros(2, 2, dtype=torch.uint8)
    assert from_stored(MXFP4, data.view(torch.int8), scale).shape == (2, 64)
    with pytest.raises(ModelError, match=r"scales need torch.uint8 \[2, 2\], not .*\[2, 3\]"):
        from_stored(MXFP4, data, torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ModelError, match="one-byte"):
        from_stored(MXFP4, data.int(), scale)
    with pytest.raises(ModelError, match="second scale"):
        from_stored(NVFP4, data, torch.zeros(2, 4, dtype=torch.uint8))
    with pytest.raises(ModelError, match="float32 or float64"):
        encode(torch.zeros(2, 64, dtype=torch.bfloat16), MXFP4)
    second = torch.ones(1)
    assert from_stored(NVFP4, data, torch.zeros(2, 4, dtype=torch.uint8), second).second is not None
