"""Calls of the sorting kernels: (token, choice) pairs by expert, in row blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.launch import ceil_div, prepared
from metainfer.ops.linear.fp8 import quantise
from metainfer.ops.moe_experts import triton_sort
from metainfer.ops.moe_experts.rounded import Rounded, Rows
from metainfer.ops.moe_experts.sorting import (
    PLAN_ROWS,
    SLOTS,
    SORT_WARPS,
    SORTED_PAIRS,
    blocks_of,
    counted,
    lanes,
    plan_of,
    share_of,
)

count_kernel, sort_kernel = prepared(triton_sort.count_kernel), prepared(triton_sort.sort_kernel)
plan_kernel = prepared(triton_sort.plan_kernel)


def planned(x: Rows, ids: Tensor, experts: int, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, scales) of `quantise` in mixed order, (order, table) of `sorted_plan`.

    x [T, D], ids [T, k] int32. One launch where the pairs are few.
    """
    if isinstance(x, Rounded):
        return x.elements, x.scales, *sorted_plan(ids, experts, m)
    (tokens, d), pairs, device = x.shape, ids.numel(), x.device
    slots = plan_of(pairs)
    if not slots:
        return (*quantise(x, mixed=True), *sorted_plan(ids, experts, m))
    q = torch.empty((tokens, d), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((tokens, d // 128), dtype=torch.float32, device=device)
    order, table = _room(ids, experts, m)
    plan_kernel[(ceil_div(slots, SLOTS) + d // 128 * ceil_div(tokens, PLAN_ROWS),)](
        x, q, scales, ids, order, table, tokens, x.stride(0), pairs, table.shape[0], d, experts,
        lanes(experts), m, PLAN_ROWS, slots, num_warps=SORT_WARPS,
    )  # fmt: skip
    return q, scales, order, table


def sorted_plan(ids: Tensor, experts: int, m: int) -> tuple[Tensor, Tensor]:
    """(order [pairs] int32, table [blocks, 3] int32): pairs sorted by expert in row blocks of `m`.

    As many blocks as there can be; those past the last hold no pairs. Pairs of no expert (-1) are
    in no block, and the last places of `order` are then left as they are.
    """
    order, table = _room(ids, experts, m)
    _sort(ids, order, experts, m, table=table)
    return order, table


def sorted_bounds(ids: Tensor, experts: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order [pairs], first block [E + 1], first place [E + 1]) of each expert, int64."""
    order = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
    tiles = torch.empty(experts + 1, dtype=torch.int64, device=ids.device)
    bounds = torch.empty_like(tiles)
    _sort(ids, order, experts, m, tiles=tiles, bounds=bounds)
    return order, tiles, bounds


def _room(ids: Tensor, experts: int, m: int) -> tuple[Tensor, Tensor]:
    pairs, device = ids.numel(), ids.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    shape = (blocks_of(pairs, experts, m), 3)
    return order, torch.empty(shape, dtype=torch.int32, device=device)


def _sort(
    ids: Tensor, order: Tensor, experts: int, m: int, *, table: Tensor | None = None,
    tiles: Tensor | None = None, bounds: Tensor | None = None,
) -> None:  # fmt: skip
    pairs, blocks = ids.numel(), 0 if table is None else table.shape[0]
    few, wide = pairs <= SORTED_PAIRS, lanes(experts)
    share = 1 if few else share_of(pairs)
    programs = ceil_div(pairs, SLOTS * share)
    counts = order
    if not few:
        counts = torch.empty((programs, wide), dtype=torch.int32, device=ids.device)
        count_kernel[(programs,)](ids, counts, pairs, share, wide, num_warps=SORT_WARPS)
    sort_kernel[(programs,)](
        ids, counts, order, table, tiles, bounds, pairs, blocks, share, experts, wide, m,
        counted(pairs) if few else 0, table is not None, num_warps=SORT_WARPS,
    )  # fmt: skip
