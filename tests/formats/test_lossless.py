"""MXFP4 to NVFP4 and to FP8 without changing a bit, or a refusal with tensor and span."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import InternalError, ModelError
from metainfer.formats import block_codecs, lossless
from metainfer.formats.block_codecs import BlockTensor, decode, encode
from metainfer.formats.blocks import FP8_32, FP8_128, FP8_128_F32, MXFP4, NVFP4
from metainfer.formats.lossless import (
    mxfp4_to_fp8,
    mxfp4_to_nvfp4,
    recode,
    same_bits,
    shared_exponent,
)


def mxfp4(exponents: list[int], codes: str = "all", rows: int = 1) -> BlockTensor:
    """One block of 32 per exponent; all sixteen codes twice, or all zeros."""
    k = 32 * len(exponents)
    block = torch.arange(16, dtype=torch.uint8) * 0x11
    if codes == "zeros":
        block = torch.tensor([0x00, 0x88] * 8, dtype=torch.uint8)
    data = block.repeat(rows, len(exponents))
    scale = torch.tensor([exponents] * rows, dtype=torch.int32) + 127
    return BlockTensor(MXFP4, (rows, k), data, scale.to(torch.uint8))


def holds(a: BlockTensor, b: BlockTensor) -> bool:
    return all(same_bits(decode(a, d), decode(b, d)) for d in (torch.float32, torch.float64))


def test_e4m3_holds_eighteen_powers_of_two() -> None:
    """The fact behind the rule, by enumeration."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    powers = [e for e in range(-20, 20) if (values == 2.0**e).any()]
    assert powers == list(range(lossless.E4M3_LOW, lossless.E4M3_HIGH + 1)) and len(powers) == 18
    assert lossless.MAX_SPAN == 17


@given(low=st.integers(-127, 127), span=st.integers(0, 17), seed=st.integers(0, 2**31))
def test_span_of_seventeen_is_exact_everywhere(low: int, span: int, seed: int) -> None:
    high = min(low + span, 127)
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high + 1, (6,), generator=generator).tolist()
    tensor = mxfp4([low, high, *exponents], rows=2)
    result = mxfp4_to_nvfp4(tensor, "w1")
    assert result.format == NVFP4 and holds(tensor, result)
    assert result.data is tensor.data and result.second is not None
    assert float(result.second) >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("low", [-127, -40, 0, 109])
def test_span_of_eighteen_is_refused_by_name(low: int) -> None:
    with pytest.raises(ModelError, match=rf"'layers\.3\.w1' span 18 \(2\^{low} .. ") as caught:
        mxfp4_to_nvfp4(mxfp4([low, low + 18]), "layers.3.w1")
    assert caught.value.code == "not_lossless"
    with pytest.raises(ModelError, match="'w1' span 18"):
        recode(mxfp4([low, low + 18]), NVFP4, "w1", lossless=True)
    rounded = recode(mxfp4([low, low + 18]), NVFP4, "w1", lossless=False)
    assert rounded.format == NVFP4


def test_blocks_of_zeros_do_not_count() -> None:
    tensor = mxfp4([0, 5, 0])
    tensor.data[:, :16] = 0x08
    tensor.scale[0, 0] = 254
    result = mxfp4_to_nvfp4(tensor, "w1")
    assert holds(tensor, result)  # negative zeros too
    zeros = mxfp4([90, -90], codes="zeros")
    assert holds(zeros, mxfp4_to_nvfp4(zeros, "w1"))
    tensor.data[0, 0] = 0x10  # one small element makes the block count
    with pytest.raises(ModelError, match="span 127"):
        mxfp4_to_nvfp4(tensor, "w1")


def test_fused_matrices_share_their_second_scale() -> None:
    w1, w3 = mxfp4([-10, -3]), mxfp4([-1, 2])
    exponent = shared_exponent([w1, w3], ["w1", "w3"])
    a, b = (mxfp4_to_nvfp4(t, "w", exponent) for t in (w1, w3))
    assert a.second is not None and b.second is not None and torch.equal(a.second, b.second)
    assert holds(w1, a) and holds(w3, b)
    with pytest.raises(ModelError, match=r"'w1', 'w3' span 30"):
        shared_exponent([mxfp4([0]), mxfp4([30])], ["w1", "w3"])
    assert shared_exponent([mxfp4([7], codes="zeros")], ["w1"]) == 0


def test_scales_stay_normal_where_they_can() -> None:
    result = mxfp4_to_nvfp4(mxfp4([-20, -20 + 14]), "w1")
    assert result.scale.tolist() == [[8, 8, 15 << 3, 15 << 3]]  # 2^-6 and 2^8


def test_a_wrong_result_is_never_given_out() -> None:
    with pytest.raises(InternalError, match="'w1': nvfp4 differs"):
        mxfp4_to_nvfp4(mxfp4([0, 3]), "w1", exponent=20)


def test_nan_scales_are_refused() -> None:
    for convert in (mxfp4_to_nvfp4, lambda t, name: mxfp4_to_fp8(t, FP8_128, name)):
        with pytest.raises(ModelError, match="'w1' has scales that are NaN"):
            convert(mxfp4([0, 128]), "w1")


@pytest.mark.parametrize("columns", [32, 48, 16, 2])
def test_ragged_columns(columns: int) -> None:
    tensor = mxfp4([1, 3])
    data = tensor.data[:, : columns // 2].contiguous()
    tensor = BlockTensor(MXFP4, (1, columns), data, tensor.scale[:, : -(-columns // 32)])
    for result in (mxfp4_to_nvfp4(tensor, "w"), mxfp4_to_fp8(tensor, FP8_32, "w")):
        assert holds(tensor, result)


@given(low=st.integers(-127, 100), span=st.integers(0, 14), seed=st.integers(0, 2**31))
def test_fp8_blocks_hold_a_span_of_fourteen(low: int, span: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(low, low + span + 1, (6,), generator=generator).tolist()
    tensor = mxfp4([low, low + span, *picks], rows=3)
    assert holds(tensor, mxfp4_to_fp8(tensor, FP8_128, "w1"))


def test_fp8_refuses_a_span_of_fifteen_inside_a_block_only() -> None:
    with pytest.raises(ModelError, match="'w1' span 15 inside a 128x128 block, FP8 holds 14"):
        mxfp4_to_fp8(mxfp4([0, 15]), FP8_128, "w1")
    apart = mxfp4([0, 0, 0, 0, 15])
    assert holds(apart, mxfp4_to_fp8(apart, FP8_128, "w1"))
    smaller = mxfp4([0, 15])
    assert holds(smaller, mxfp4_to_fp8(smaller, FP8_32, "w1"))
    with pytest.raises(ModelError, match="cannot be recoded"):
        mxfp4_to_fp8(smaller, FP8_128_F32, "w1")


def test_recode_between_any_two(seed: int) -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
    for source in (FP8_32, MXFP4, NVFP4):
        tensor = encode(values, source)
        assert recode(tensor, source, "w", lossless=True) is tensor
        for target in (FP8_32, FP8_128, MXFP4, NVFP4):
            result = recode(tensor, target, "w", lossless=False)
            assert result.format == target and torch.isfinite(decode(result)).all()
    with pytest.raises(ModelError, match="mxfp4 does not hold every value of 'w'"):
        recode(encode(values, FP8_32), MXFP4, "w", lossless=True)
    few = encode((values > 0).float(), FP8_32)
    assert holds(few, recode(few, MXFP4, "w", lossless=True))


def test_the_proof_looks_at_bits() -> None:
    zeros = torch.zeros(3)
    assert not same_bits(zeros, -zeros) and not same_bits(zeros, zeros.double())
    assert same_bits(zeros.double(), zeros.double())
    assert block_codecs.decode(mxfp4([0])).dtype == torch.float32
