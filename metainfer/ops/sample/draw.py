"""A stateless random number for (seed, index): the same on any device, in any batch, at any step.

Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014; Stafford's mix 13) in wrapping
int64 arithmetic, which torch computes identically on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """float64 in [0, 1) with 53 random bits, elementwise over int64 `seed` and `index`."""
    bits = _mix(_mix(seed + _GOLDEN) + index * _GOLDEN + _MIX1)
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)
