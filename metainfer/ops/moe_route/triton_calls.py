"""Calls of the routing kernel: one launch each."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from metainfer.ops.moe_route.tiles import FEW, FEW_ROWS, lanes, splits_for, tile_for
from metainfer.ops.moe_route.triton import route_kernel


@cache
def _units(device: torch.device) -> int:
    """Multiprocessors; the interpreter's host stands for a small card."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def _counters(device: torch.device, gate: int) -> Tensor:
    """Arrivals per block of few tokens at the gate stored at `gate`: zero before and after every
    call."""
    return torch.zeros(FEW_ROWS // FEW.m, dtype=torch.int32, device=device)


def moe_route(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, scale: float, splits: int = 0
) -> tuple[Tensor, Tensor]:
    """See `ref.moe_route`."""
    return _route(x, gate, bias, None, None, top_k, scale, splits)


def moe_route_hash(
    x: Tensor, gate: Tensor, table: Tensor, token_ids: Tensor, *, scale: float, splits: int = 0
) -> tuple[Tensor, Tensor]:
    """See `ref.moe_route_hash`."""
    return _route(x, gate, None, table, token_ids, table.shape[1], scale, splits)


def _route(
    x: Tensor, gate: Tensor, bias: Tensor | None, table: Tensor | None, tokens: Tensor | None,
    top_k: int, scale: float, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`splits` shares out the channels of few tokens; the sum is the same every time."""
    (rows, k), experts, device = x.shape, gate.shape[0], x.device
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=device)
    if rows == 0:
        return ids, weights
    tile = tile_for(rows, experts)
    splits = splits or splits_for(rows, k, _units(device))
    wide = lanes(experts)
    parts, counters = weights, ids
    if splits > 1:
        parts = torch.empty((splits, rows, wide), dtype=torch.float32, device=device)
        counters = _counters(device, gate.data_ptr())
    share = triton.cdiv(triton.cdiv(k, tile.k), splits)
    # float16 has no room for the parts of a float32 gate
    exact = x.dtype == torch.float32 or x.dtype == torch.float16 != gate.dtype
    route_kernel[(triton.cdiv(rows, tile.m), splits)](
        x, gate, bias, table, tokens, parts, counters, ids, weights, rows, x.stride(0), scale,
        share, k, experts, wide, top_k, triton.next_power_of_2(top_k), tile.m, tile.k,
        table is not None, splits == 1, exact, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return ids, weights
