"""Cosine and sine tables for rotary embeddings, with the published context extensions.

Formulas: RoPE (arXiv 2104.09864), linear interpolation (2306.15595), NTK-aware "dynamic",
Llama 3.1's smoothed cut-offs, YaRN (2309.00071), LongRoPE (2402.13753), with the defaults that
`transformers`' `modeling_rope_utils` gives to missing keys. Angles are computed in float64.

Two types depend on how long the text is. A table serves a fixed `length`, so ``dynamic`` scales
its base for that length (at most the trained one: unscaled), and ``longrope`` takes its long
factors when `length` exceeds the trained context, for all positions: an engine cannot re-rotate
keys that are already cached when one sequence grows past the border.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.ops.rope.spec import RopeSpec

__all__ = ["RopeSpec", "cos_sin", "frequencies"]


def cos_sin(spec: RopeSpec, length: int) -> Tensor:
    """float32 [length, R]: R/2 cosines, then R/2 sines, of each position; factor included."""
    inverse, factor = frequencies(spec, length)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * inverse  # [length, R/2]
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * factor).float()


def frequencies(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    """Radians per position, float64 [R/2], and the factor that multiplies cosines and sines.

    Raises:
        ModelError: unknown scaling type, or a key of it is missing or malformed.
    """
    if spec.rotated % 2 or spec.rotated <= 0:
        raise ModelError(f"{spec.rotated} rotated channels; the number must be even and positive.")
    kind = spec.kind
    if kind == "linear":
        return _base(spec, spec.theta) / spec.number("factor"), 1.0
    if kind == "dynamic":
        return _dynamic(spec, length), 1.0
    if kind == "llama3":
        return _llama3(spec), 1.0
    if kind == "yarn":
        return _yarn(spec)
    if kind == "longrope":
        return _longrope(spec, length)
    return _base(spec, spec.theta), 1.0


def _base(spec: RopeSpec, theta: float) -> Tensor:
    exponents = torch.arange(0, spec.rotated, 2, dtype=torch.float64) / spec.rotated
    return 1.0 / theta**exponents


def _dynamic(spec: RopeSpec, length: int) -> Tensor:
    factor, trained = spec.number("factor"), spec.context
    grown = factor * max(length, trained) / trained - (factor - 1)
    return _base(spec, spec.theta * grown ** (spec.rotated / (spec.rotated - 2)))


def _llama3(spec: RopeSpec) -> Tensor:
    factor = spec.number("factor")
    low, high = spec.number("low_freq_factor"), spec.number("high_freq_factor")
    base = _base(spec, spec.theta)
    waves = 2 * math.pi / base
    smooth = (spec.original / waves - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = torch.where(waves > spec.original / low, base / factor, blended)
    return torch.where(waves < spec.original / high, base, scaled)


def _yarn(spec: RopeSpec) -> tuple[Tensor, float]:
    original = spec.original
    factor = spec.number("factor", spec.context / original)
    fast, slow = spec.number("beta_fast", 32.0) or 32.0, spec.number("beta_slow", 1.0) or 1.0

    def channel(turns: float) -> float:
        """The pair that makes `turns` whole turns over the trained context."""
        span = math.log(original / (turns * 2 * math.pi))
        return spec.rotated * span / (2 * math.log(spec.theta))

    low, high = channel(fast), channel(slow)
    if spec.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotated - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(spec.rotated // 2, dtype=torch.float64) - low) / (high - low)
    interpolated = ramp.clamp(0, 1)
    base = _base(spec, spec.theta)
    inverse = base / factor * interpolated + base * (1 - interpolated)
    return inverse, _yarn_factor(spec, factor)


def _yarn_factor(spec: RopeSpec, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if spec.scaling.get("attention_factor") is not None:
        return spec.number("attention_factor")
    over, under = spec.scaling.get("mscale"), spec.scaling.get("mscale_all_dim")
    if over and under:
        return mscale(spec.number("mscale")) / mscale(spec.number("mscale_all_dim"))
    return mscale(1.0)


def _longrope(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    original = spec.original
    key = "long_factor" if length > original else "short_factor"
    factors = spec.scaling.get(key)
    if not isinstance(factors, (list, tuple)) or len(factors) != spec.rotated // 2:
        raise ModelError(
            f"longrope needs {spec.rotated // 2} numbers in {key}.",
            "The checkpoint's config.json is incomplete.",
            code="unsupported_rope",
        )
    inverse = _base(spec, spec.theta) / torch.tensor(factors, dtype=torch.float64)
    if spec.scaling.get("attention_factor") is not None:
        return inverse, spec.number("attention_factor")
    factor = spec.number("factor", spec.context / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inverse, grown


def unturned(table: Tensor) -> Tensor:
    """A table [M, R] of angles 0: nothing is rotated."""
    flat = torch.zeros_like(table)
    flat[:, : table.shape[1] // 2] = 1.0
    return flat
