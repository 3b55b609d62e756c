"""Rounding that DeepSeek-V4's recipe applies to activations and to what it caches.

Each function returns what a tensor becomes by being quantised and read back, in the tensor's own
dtype; arithmetic is float32 (float64 for float64). Source: ``act_quant`` and ``fp4_act_quant`` of
the models' published inference code (``kernel.py``): the block's largest magnitude is floored,
divided by the largest element, and the scale rounded up to a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.core.errors import UsageError
from metainfer.formats import elements

#: Floor of amax for e4m3 blocks (activations and cache entries).
E4M3_AMAX_FLOOR = 1e-4
#: Floor of amax for e2m1 blocks with power-of-two scales: the scale stays a normal float32.
E2M1_AMAX_FLOOR = 6 * 2.0**-126


def activation_fp8(x: Tensor, group: int = 128) -> Tensor:
    """GEMM inputs [..., K]: e4m3 with a power-of-two scale per `group` channels of a token.

    V4: 128; V4.1: 32. Scale 2^ceil(log2(amax/448)), amax at least 1e-4.
    """
    return _power_of_two(x, group, 448.0, E4M3_AMAX_FLOOR)


def quantise_fp8(x: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """`activation_fp8` before it is read back: (e4m3 [..., K], scales [..., K/group] float32).

    The scale of a group that holds NaN or infinity is NaN.
    """
    scaled, scale, amax = _scaled(x, group, 448.0, E4M3_AMAX_FLOOR)
    scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    codes = elements.e4m3_encode(scaled).flatten(-2)
    return codes.view(torch.float8_e4m3fn), scale.squeeze(-1).float()


def index_fp4(x: Tensor, group: int = 32) -> Tensor:
    """Indexer queries and keys [..., 128]: e2m1, scale 2^ceil(log2(amax/6)) per 32.

    amax is at least 6 * 2^-126.
    """
    return _power_of_two(x, group, 6.0, E2M1_AMAX_FLOOR)


def kv_fp8(x: Tensor, group: int = 64, rope: int = 64) -> Tensor:
    """Cache entries [..., D]: e4m3 per `group` of the first D - `rope`; the tail is kept.

    V4: group 64, rope 64 of 512. V4.1's window: group 32, rope 0 (all 512 are quantised).
    """
    body = x.shape[-1] - rope
    if body <= 0:
        raise UsageError(
            f"A cache entry of {x.shape[-1]} has no room for {rope} rotated dimensions.",
            "Check head_dim and qk_rope_head_dim.",
        )
    rounded = _power_of_two(x[..., :body], group, 448.0, E4M3_AMAX_FLOOR)
    return torch.cat((rounded, x[..., body:]), dim=-1)


def kv_fp4(x: Tensor, group: int = 16) -> Tensor:
    """V4.1's main cache entries [..., 512]: e2m1 with an e4m3 scale per 16.

    Scale e4m3(clamp(amax/6, 2^-9, 448)); no second scale.
    """
    blocks, amax = _groups(x, group)
    scale = elements.e4m3_round((amax / 6).clamp(2.0**-9, 448.0))
    codes = elements.e2m1_encode((blocks / scale).nan_to_num(nan=0.0))
    return _back(elements.e2m1_decode(codes, blocks.dtype) * scale, amax, x)


def _groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(blocks [..., K/group, group], amax [..., K/group, 1]) in the working dtype."""
    if x.shape[-1] % group:
        raise UsageError(
            f"{x.shape[-1]} channels are not a whole number of groups of {group}.",
            "Pad the channels with zeros, or use the model's own group.",
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    blocks = x.to(wide).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    return blocks, blocks.abs().amax(dim=-1, keepdim=True)


def _scaled(x: Tensor, group: int, largest: float, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """(blocks over their scales, scales, amax), the last two [..., K/group, 1]."""
    blocks, amax = _groups(x, group)
    # Infinity has no exponent to round; whoever reads puts NaN there.
    bounded = torch.where(torch.isfinite(amax), amax, 0).clamp(min=floor)
    scale = elements.power_of_two(elements.ceil_exponent(bounded, largest), blocks.dtype)
    return (blocks / scale).nan_to_num(nan=0.0), scale, amax


def _power_of_two(x: Tensor, group: int, largest: float, floor: float) -> Tensor:
    scaled, scale, amax = _scaled(x, group, largest, floor)
    if largest == 6.0:
        rounded = elements.e2m1_decode(elements.e2m1_encode(scaled), scaled.dtype)
    else:
        rounded = elements.e4m3_round(scaled)
    return _back(rounded * scale, amax, x)


def _back(blocks: Tensor, amax: Tensor, like: Tensor) -> Tensor:
    """Blocks as `like`; a block that held NaN or infinity is NaN throughout."""
    blocks = torch.where(torch.isfinite(amax), blocks, torch.nan)
    return blocks.flatten(-2).to(like.dtype)
