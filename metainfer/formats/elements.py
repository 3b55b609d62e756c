"""The three small number formats, bit for bit: e2m1, e4m3 (finite-only), e8m0.

Values are rounded to nearest, ties to even, and saturate. The arithmetic is exact in float32 and
in float64; torch's own cast from float64 to e4m3 rounds twice (through float32), so it is not
used for that. Sources: OCP Microscaling Formats v1.0 (5.3, 5.4), OCP 8-bit Floating Point v1.0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

#: The byte of e8m0 that is NaN.
E8M0_NAN = 255
#: The byte of e4m3 that is NaN.
E4M3_NAN = 0x7F
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbours, and whether a tie goes up (to the even code).
_E2M1_TIES = (
    (0.25, False), (0.75, True), (1.25, False), (1.75, True),
    (2.5, False), (3.5, True), (5.0, False),
)  # fmt: skip


def e2m1_encode(values: Tensor) -> Tensor:
    """Codes 0..15 (uint8, bit 3 = sign) of `values`; NaN is the caller's to exclude.

    Magnitudes above 6 become 6. Zero keeps its sign.
    """
    size = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for middle, up in _E2M1_TIES:
        codes += (size >= middle) if up else (size > middle)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of codes 0..15."""
    return _e2m1_table(dtype, codes.device)[codes.long()]


def e2m1_pack(codes: Tensor) -> Tensor:
    """Codes [..., K] to bytes [..., K/2]; the low nibble is the even column."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e2m1_unpack(packed: Tensor) -> Tensor:
    """Bytes [..., K/2] (uint8 or int8) to codes [..., K]."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e4m3_round(values: Tensor) -> Tensor:
    """`values` on the e4m3 grid, in their own dtype; |x| > 448 saturates, NaN stays NaN.

    The step is 2^-9 below 2^-6 and 2^(floor(log2 |x|) - 3) above.
    """
    values = values.clamp(-448.0, 448.0)
    exponent = torch.frexp(values).exponent.clamp(min=-5) - 4
    step = torch.ldexp(torch.ones_like(values), exponent)
    return torch.round(values / step) * step  # torch.round: half to even


def e4m3_encode(values: Tensor) -> Tensor:
    """Bytes (uint8) of `values`; NaN becomes a NaN byte."""
    # On the grid the cast has nothing left to round, whatever the torch release does at the ends.
    return e4m3_round(values).to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of e4m3 bytes."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32).to(dtype)


def e8m0_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127); byte 255 is NaN. 2^-127 is a float32 subnormal and exact."""
    return _e8m0_table(dtype, codes.device)[codes.view(torch.uint8).long()]


def ceil_exponent(amax: Tensor, largest: float) -> Tensor:
    """The smallest e (int32) with amax <= largest * 2^e, for finite amax > 0; exact.

    It equals ceil(log2(amax / largest)) without the rounding of a logarithm. `largest` is 448 or
    6; DeepSeek's kernel computes ceil(log2(fl(amax * fl(1/largest)))) in float32, which gives the
    same exponent for every normal float32 (tests, over all mantissas).
    """
    mantissa, exponent = torch.frexp(amax)
    top_mantissa, top_exponent = math.frexp(largest)
    return exponent - top_exponent + (mantissa > top_mantissa).to(torch.int32)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exact also where float32 is subnormal."""
    ones = torch.ones(exponent.shape, dtype=torch.float64, device=exponent.device)
    return torch.ldexp(ones, exponent).to(dtype)


@lru_cache(maxsize=16)
def _e2m1_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of all codes: on the device once, since a captured step copies nothing there."""
    return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=dtype, device=device)


@lru_cache(maxsize=16)
def _e8m0_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    table = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(-127, 129))
    table[E8M0_NAN] = torch.nan
    return table.to(dtype).to(device)
