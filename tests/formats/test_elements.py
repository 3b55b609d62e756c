"""e2m1, e4m3 and e8m0: every code, every tie, against definitions written out independently."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from metainfer.formats import elements

BOTH = [torch.float32, torch.float64]


def e4m3_by_definition(code: int) -> float:
    """OCP OFP8: sign, 4 exponent bits (bias 7), 3 mantissa bits; S.1111.111 is NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def e2m1_by_definition(code: int) -> float:
    """OCP MX: sign, 2 exponent bits (bias 1), 1 mantissa bit."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise, all NaN alike."""
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    nan = torch.isnan(a)
    if not torch.equal(nan, torch.isnan(b)):
        return False
    return torch.equal(a[~nan].view(kinds[a.dtype]), b[~nan].view(kinds[b.dtype]))


def around(value: float, dtype: torch.dtype) -> Tensor:
    """`value` and its two neighbours in `dtype`."""
    x = torch.tensor([value], dtype=dtype)
    inf = torch.tensor([math.inf], dtype=dtype)
    return torch.cat((torch.nextafter(x, -inf), x, torch.nextafter(x, inf)))


@pytest.mark.parametrize("dtype", BOTH)
def test_all_codes_decode_to_their_definition(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = torch.tensor([e4m3_by_definition(c) for c in range(256)], dtype=dtype)
    assert same(elements.e4m3_decode(codes, dtype), e4m3)
    e2m1 = torch.tensor([e2m1_by_definition(c) for c in range(16)], dtype=dtype)
    assert same(elements.e2m1_decode(codes[:16], dtype), e2m1)
    e8m0 = torch.tensor([2.0 ** (c - 127) for c in range(255)] + [math.nan], dtype=dtype)
    assert same(elements.e8m0_decode(codes, dtype), e8m0)
    # torch's own reading of the bytes
    assert same(elements.e8m0_decode(codes), codes.view(torch.float8_e8m0fnu).float())


@pytest.mark.parametrize("dtype", BOTH)
def test_codes_survive_a_round_trip(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    again = elements.e4m3_encode(elements.e4m3_decode(codes, dtype))
    finite = (codes & 127) != elements.E4M3_NAN
    assert torch.equal(again[finite], codes[finite])
    assert ((again[~finite] & 127) == elements.E4M3_NAN).all()
    assert torch.equal(elements.e2m1_encode(elements.e2m1_decode(codes[:16], dtype)), codes[:16])


@pytest.mark.parametrize("dtype", BOTH)
def test_e2m1_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    for code in range(7):
        low, high = e2m1_by_definition(code), e2m1_by_definition(code + 1)
        middle = around((low + high) / 2, dtype)
        even = code if code % 2 == 0 else code + 1
        expected = torch.tensor([code, even, code + 1], dtype=torch.uint8)
        assert torch.equal(elements.e2m1_encode(middle), expected)
        assert torch.equal(elements.e2m1_encode(-middle), expected | 8)
    ends = torch.tensor([6.0, 7.0, 1e30, math.inf, -math.inf, 0.0, -0.0], dtype=dtype)
    assert elements.e2m1_encode(ends).tolist() == [7, 7, 7, 7, 15, 0, 8]


@pytest.mark.parametrize("dtype", BOTH)
def test_e4m3_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    for code in range(126):
        low, high = e4m3_by_definition(code), e4m3_by_definition(code + 1)
        middle = around((low + high) / 2, dtype)
        even = code if code % 2 == 0 else code + 1
        expected = torch.tensor([code, even, code + 1], dtype=torch.uint8)
        assert torch.equal(elements.e4m3_encode(middle), expected), code
        assert torch.equal(elements.e4m3_encode(-middle), expected | 128), code
    ends = torch.tensor([448.0, 449.0, 464.0, 480.0, 1e30, math.inf, 0.0, -0.0], dtype=dtype)
    assert elements.e4m3_encode(ends).tolist() == [126] * 6 + [0, 128]
    assert elements.e4m3_round(ends).tolist() == [448.0] * 6 + [0.0, 0.0]
    assert int(elements.e4m3_encode(torch.tensor([math.nan], dtype=dtype))) & 127 == 127


def test_e4m3_equals_torch_on_every_bfloat16_and_random_float32(seed: int) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    random = torch.randn(200_000, generator=torch.Generator().manual_seed(seed))
    random = random * torch.exp2(torch.linspace(-14, 9, random.numel()))
    for values in (every, random):
        values = values[values.abs() <= 448]
        expected = values.to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(elements.e4m3_encode(values), expected)


def test_float64_is_rounded_once() -> None:
    just_above = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert float(elements.e4m3_round(just_above)) == 1.125
    # torch goes through float32, where the value is a tie: why its cast is not used
    assert float(just_above.to(torch.float8_e4m3fn).double()) == 1.0


def test_the_low_nibble_is_the_even_column() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    packed = elements.e2m1_pack(codes)
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(elements.e2m1_unpack(packed), codes)
    assert torch.equal(elements.e2m1_unpack(packed.view(torch.int8)), codes)


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_ceil_exponent_over_all_mantissas(largest: float) -> None:
    """Exact, and equal to the published kernel's float32 arithmetic, product or quotient."""
    amax = (torch.arange(2**23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    ours = elements.ceil_exponent(amax, largest)
    for ratio in (amax * (torch.tensor(1.0) / largest), amax / largest):
        bits = ratio.view(torch.int32)
        kernel = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)
        assert torch.equal(ours, kernel)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_ceil_exponent_at_the_boundaries(largest: float, dtype: torch.dtype) -> None:
    for power in range(-130, 119):
        at = around(largest * 2.0**power, dtype)
        assert elements.ceil_exponent(at, largest).tolist() == [power, power, power + 1], power


def test_powers_of_two_reach_below_the_normal_range() -> None:
    exponents = torch.tensor([-149, -127, -126, 0, 127])
    expected = [2.0**e for e in exponents.tolist()]
    assert elements.power_of_two(exponents, torch.float32).tolist() == expected
