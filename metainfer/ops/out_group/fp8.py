"""Calls of the grouped FP8 products: few tokens stream the weight, many have it decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.ops.launch import prepared
from metainfer.ops.linear.fp8 import capability, parts_of, units
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.tiles import has_e4m3
from metainfer.ops.out_group import triton_group
from metainfer.ops.out_group.tiles import FEW_ROWS, GroupTile, splits_for, tile_for
from metainfer.ops.out_group.torch_group import batched

decode_kernel = prepared(triton_group.decode_kernel)
group_kernel = prepared(triton_group.group_kernel)


def grouped(
    o: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    groups: int,
    tile: GroupTile | None = None,
    splits: int = 0,
) -> Tensor:
    """``z_g = W_g . o_g``: o [T <= 128, groups K], weight e4m3 (or its bytes) [N, K], scale
    [N / 128, K / 128] as float32 or the bytes of 2^(byte - 127) -> [T, N] in o's dtype."""
    rows, (n, k), device = o.shape[0], weight.shape, o.device
    out = torch.empty((rows, n), dtype=o.dtype, device=device)
    if rows == 0:
        return out
    tile = tile or tile_for(capability(device), rows)
    if rows > tile.m:
        raise InternalError(f"a tile of {tile.m} tokens was asked to serve {rows}")
    splits = splits or splits_for(tile, n, k, units(device))
    tiles = n // tile.n
    parts, counters = parts_of(out, weight, tiles, splits)
    group_kernel[(tiles, splits)](
        o, weight, scale, out, parts, counters, rows, n, scale.stride(0),
        k, n // groups, tile.m, tile.n, splits, scale.dtype == torch.uint8, _wide_type(o),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def decoded(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] in `dtype`, rounded once; as `grouped` takes it."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    cols = 512 if k % 512 == 0 else 128
    decode_kernel[(n // 32, k // cols)](
        weight, scale, out, scale.stride(0), k, 32, cols, scale.dtype == torch.uint8, num_warps=4
    )
    return out


def out_group(
    o: Tensor, weight: PackedWeight, *, groups: int, tile: Mapping[str, Any] | None = None
) -> Tensor:
    """See `ref.out_group`; ``stored@1`` FP8 in blocks of 128, groups of a multiple of 128 rows.

    `tile`: fields of `GroupTile`, the card's own where it is None.
    """
    elements, scales = weight.data["elements"], weight.data["scales"]
    if has_e4m3(capability(o.device)):
        elements = elements.view(torch.float8_e4m3fn)
    if o.shape[0] > FEW_ROWS:
        return batched(o, decoded(elements, scales, o.dtype), groups)
    chosen = GroupTile(**tile) if tile else None
    return grouped(o.flatten(1), elements, scales, groups=groups, tile=chosen)


def _wide_type(o: Tensor) -> tl.dtype:
    """The type of the products: the activations', float32 in the interpreter."""
    if o.device.type != "cuda":
        return tl.float32
    return tl.bfloat16 if o.dtype == torch.bfloat16 else tl.float16
