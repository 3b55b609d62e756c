"""The rotary tables of DeepSeek-V4, in the arithmetic of its inference code: float32 throughout.

Frequencies, their YaRN blend and the angle ``position * frequency`` are float32 there, so a table
computed in float64 would differ from the model's own at positions near a million by more than the
rounding of bf16: the recipe is the reference. Formulas: RoPE (arXiv 2104.09864), YaRN (2309.00071)
without its amplitude factor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch, Yarn


def table(arch: DeepSeekV4Arch, positions: int, *, compress: bool) -> Tensor:
    """Cosines then sines, float32 [positions, R]; `compress`: of the layers with entries."""
    theta = arch.compress_theta if compress else arch.theta
    each = frequencies(arch.rope_dim, theta, arch.yarn if compress else None)
    angles = torch.arange(positions).unsqueeze(1) * each  # [M, R / 2] float32
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def frequencies(rotated: int, theta: float, yarn: Yarn | None) -> Tensor:
    """Radians per position of each pair, float32 [R / 2]."""
    each = 1.0 / theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if yarn is None:
        return each

    def pair(turns: float) -> float:
        """The pair that makes `turns` whole turns over the trained context."""
        span = math.log(yarn.original / (turns * 2 * math.pi))
        return rotated * span / (2 * math.log(theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high: float = min(math.ceil(pair(yarn.beta_slow)), rotated - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return each / yarn.factor * (1 - kept) + each * kept
