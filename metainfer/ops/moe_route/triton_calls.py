"""Calls of the routing kernels: two launches each."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.launch import ceil_div, power_of_2, prepared
from metainfer.ops.linear.fp8 import capability
from metainfer.ops.moe_route import triton as kernels
from metainfer.ops.moe_route.tiles import Tile, lanes, tile_for

choose_kernel, score_kernel = prepared(kernels.choose_kernel), prepared(kernels.score_kernel)


def moe_route(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, scale: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """See `ref.moe_route`."""
    return _route(x, gate, bias, None, None, top_k, scale, tile)


def moe_route_hash(
    x: Tensor, gate: Tensor, table: Tensor, token_ids: Tensor, *, scale: float,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ref.moe_route_hash`."""
    return _route(x, gate, None, table, token_ids, table.shape[1], scale, tile)


def _route(
    x: Tensor, gate: Tensor, bias: Tensor | None, table: Tensor | None, tokens: Tensor | None,
    top_k: int, scale: float, tile: Tile | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (rows, k), experts, device = x.shape, gate.shape[0], x.device
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=device)
    if rows == 0:
        return ids, weights
    tile, wide = tile or tile_for(rows, capability(device)), lanes(experts)
    width = gate.element_size()
    parts = torch.empty((tile.splits, rows, wide), dtype=torch.float32, device=device)
    # float16 has no room for the parts of a float32 gate
    exact = x.dtype == torch.float32 or x.dtype == torch.float16 != gate.dtype
    grid = (ceil_div(rows, tile.m), ceil_div(wide, tile.e), tile.splits)
    score_kernel[grid](
        x, gate, parts, rows, x.stride(0), 1.0, k, experts, wide, tile.share(k, width), tile.m,
        tile.e, tile.step(width), exact, tile.early, num_warps=tile.warps,
        num_stages=tile.stages, launch_pdl=tile.early,
    )  # fmt: skip
    choose_kernel[(rows,)](
        parts, bias, table, tokens, ids, weights, rows, scale, experts, wide, top_k,
        power_of_2(top_k), tile.splits, table is not None, tile.early, num_warps=1,
        launch_pdl=tile.early,
    )  # fmt: skip
    return ids, weights
