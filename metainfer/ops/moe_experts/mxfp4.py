"""Calls of the MXFP4 expert kernels: streaming for few tokens, sorted row blocks for many."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from metainfer.core.errors import InternalError
from metainfer.ops.launch import ceil_div, power_of_2, prepared
from metainfer.ops.linear.fp8 import capability, quantise, wide_type
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.moe_experts import (
    triton_combine,
    triton_mxfp4,
    triton_pipelined,
    triton_wgmma,
)
from metainfer.ops.moe_experts.choice import portable_for, wgmma_for
from metainfer.ops.moe_experts.plan import planned, sorted_bounds
from metainfer.ops.moe_experts.rounded import Order, Rounded, Rows
from metainfer.ops.moe_experts.sorting import blocks_of
from metainfer.ops.moe_experts.tiles import (
    FEW_SLOTS,
    SPAN,
    TableTile,
    Tile,
    WgmmaTile,
    chunk_for,
    stream_for,
)

combine_kernel = prepared(triton_combine.combine_kernel)
stream_up_kernel = prepared(triton_mxfp4.stream_up_kernel)
stream_down_kernel = prepared(triton_mxfp4.stream_down_kernel)
chunk_up_kernel = prepared(triton_mxfp4.chunk_up_kernel)
chunk_down_kernel = prepared(triton_mxfp4.chunk_down_kernel)
pipelined_kernel = prepared(triton_pipelined.pipelined_kernel)
experts_kernel = prepared(triton_wgmma.experts_kernel)


@dataclasses.dataclass(frozen=True, slots=True)
class Mx:
    """One packed matrix: `words` int16 [R, K / 4], `scales` int32 [R, K / 128], `refs` uint8 [R]
    (largest scale of a row, blocks of zeros apart), `eight`: e4m3 holds every row exactly."""

    words: Tensor
    scales: Tensor
    refs: Tensor
    eight: bool


def prepare(data: Tensor, scale: Tensor) -> Mx:
    """From stored bytes: data uint8 [R, K / 2], low nibble first; scale uint8 [R, K / 32]."""
    rows, half = data.shape
    if half % 64 or scale.shape != (rows, half // 16):
        raise InternalError(f"MXFP4 wants K in blocks of 128, got {list(data.shape)}")
    refs = torch.empty(rows, dtype=torch.uint8, device=data.device)
    eight = True
    step = max(1, (1 << 28) // max(half, 1))
    for first in range(0, rows, step):  # in pieces: the masks are as large as the weight
        part = slice(first, first + step)
        used = (data[part].view(torch.int64) & 0x7777777777777777) != 0
        used = used.reshape(-1, half // 16, 2).any(-1)
        codes = scale[part].short()
        top = torch.where(used, codes, -1).amax(1)
        low = torch.where(used, codes, 1000).amin(1)
        # the factor 2^(ref - 6) of a row must be a normal float32
        eight &= bool(((top - low <= SPAN) & ((top > 6) | (top < 0)) & (top < 255)).all())
        refs[part] = top.clamp_min(127 - 120).to(torch.uint8)
    return Mx(data.view(torch.int16), scale.view(torch.int32), refs, eight)


def experts(
    x: Rows,
    ids: Tensor,
    routes: Tensor,
    up: Mx,
    down: Mx,
    shared: Tensor | None = None,
    *,
    experts: int,
    limit: float = 0.0,
    tile: Tile | TableTile | None = None,
    chunked: bool | None = None,
    wide: bool = False,
) -> Tensor:
    """See `ref.moe_experts`: x [T, D], ids [T, k] int32, routes [T, k] float32 -> [T, D].

    up: rows [experts 2F], down: rows [experts D]. `wide`: all products in bfloat16.
    """
    (tokens, d), top = x.shape, ids.shape[1]
    f = up.words.shape[0] // (2 * experts)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    pairs = tokens * top
    few = pairs <= FEW_SLOTS if chunked is None else not chunked
    if isinstance(tile, TableTile):
        y = _by_table(x, ids, routes, up, down, limit, experts, f, tile, few)
    else:
        form = _stream if few else _chunk
        y = form(x, ids, routes, up, down, limit, experts, f, tile, wide)
    block = 1024
    combine_kernel[(tokens, ceil_div(d, block))](
        y, ids, shared, out, d, top, block, shared is not None, num_warps=4
    )
    return out


def _by_table(
    x: Rows, ids: Tensor, routes: Tensor, up: Mx, down: Mx, limit: float, experts: int, f: int,
    tile: TableTile, few: bool,
) -> Tensor:  # fmt: skip
    (tokens, d), top, device = x.shape, ids.shape[1], x.device
    pairs = tokens * top
    hidden = torch.empty((pairs, f), dtype=x.dtype, device=device)
    y = torch.empty((pairs, d), dtype=torch.float32 if few else x.dtype, device=device)
    q, scales, order, table = planned(x, ids, experts, tile.m)
    _product(q, scales, order, table, routes, up, hidden, limit, top, True, tile)
    q, scales = quantise(hidden, mixed=True)
    _product(q, scales, order, table, routes, down, y, 0.0, top, False, tile)
    return y


def _product(
    q: Tensor, scales: Tensor, order: Tensor, table: Tensor, routes: Tensor, weight: Mx,
    out: Tensor, limit: float, top: int, up: bool, tile: TableTile,
) -> None:  # fmt: skip
    """One of the two products: ``up`` writes N / 2 hidden channels, otherwise N, N = out's."""
    k, n = q.shape[1], out.shape[1] * (2 if up else 1)
    limit = limit or float("inf")
    if isinstance(tile, WgmmaTile):
        experts_kernel[n // tile.n, table.shape[0]](
            q, scales, order, table, routes, weight.words, weight.scales, weight.refs, out, limit,
            k, n, top, up, tile.n, tile.m, tile.blocks, tile.stages, tile.warps,
            num_warps=tile.warps,
        )  # fmt: skip
    else:
        pipelined_kernel[n // tile.n, table.shape[0]](
            q, scales, order, table, routes, weight.words.view(torch.int32), weight.scales,
            weight.refs, out, limit, k, n, top, up, tile.n, tile.m, tile.least, tile.ring,
            tile.warps, tile.wgmma, num_warps=tile.warps,
        )  # fmt: skip


def _entering(x: Rows, wide: bool) -> tuple[Tensor, Tensor]:
    """What the first product reads of x: elements, and scales [T, D / 128]."""
    if isinstance(x, Rounded):
        return x.elements, x.scales
    return quantise(x, mixed=True, wide=wide)


def _stream(
    x: Rows, ids: Tensor, routes: Tensor, up: Mx, down: Mx, limit: float, experts: int, f: int,
    tile: Tile | None, wide: bool,
) -> Tensor:  # fmt: skip
    (tokens, d), top, device = x.shape, ids.shape[1], x.device
    pairs = tokens * top
    tile = tile or stream_for(capability(device), wide)
    slots = max(16, power_of_2(pairs))
    hidden = torch.empty((pairs, f), dtype=x.dtype, device=device)
    y = torch.empty((pairs, d), dtype=torch.float32, device=device)
    values, scales = _entering(x, wide)
    kind, eight = wide_type(device), device.type == "cuda" and not wide
    stream_up_kernel[(2 * f // tile.n, pairs)](
        values, scales, ids, routes, up.words, up.scales, up.refs, hidden,
        limit or float("inf"), pairs, d, f, top, tile.n, tile.m, slots,
        eight and up.eight, kind, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    values, scales = quantise(hidden, mixed=True, wide=wide)
    stream_down_kernel[(d // tile.n, pairs)](
        values, scales, ids, down.words, down.scales, down.refs, y, pairs,
        d, f, tile.n, tile.m, slots, eight and down.eight, kind,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def _chunk(
    x: Rows, ids: Tensor, routes: Tensor, up: Mx, down: Mx, limit: float, experts: int, f: int,
    tile: Tile | None, wide: bool,
) -> Tensor:  # fmt: skip
    (tokens, d), top, device = x.shape, ids.shape[1], x.device
    pairs = tokens * top
    tile = tile or chunk_for(capability(device), wide)
    order, tiles, bounds = sorted_bounds(ids, experts, tile.m)
    blocks = blocks_of(pairs, experts, tile.m)
    hidden = torch.empty((pairs, f), dtype=x.dtype, device=device)
    y = torch.empty((pairs, d), dtype=x.dtype, device=device)
    q, scales = _entering(x, wide)
    kind, eight = wide_type(device), device.type == "cuda" and not wide
    chunk_up_kernel[(2 * f // tile.n, blocks)](
        q, scales, order, tiles, bounds, routes, up.words, up.scales, up.refs, hidden,
        limit or float("inf"), d, f, experts, top, tile.n, tile.m,
        eight and up.eight, kind, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    q, scales = quantise(hidden, mixed=True, wide=wide)
    chunk_down_kernel[(d // tile.n, blocks)](
        q, scales, order, tiles, bounds, down.words, down.scales, down.refs, y, d, f, experts,
        tile.n, tile.m, eight and down.eight, kind, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


_ready: MutableMapping[Tensor, Mx] = WeakTensorKeyDictionary()


def _packed(weight: PackedWeight) -> Mx:
    """References and exactness of a packed matrix: found at the first call, which waits for the
    device once (warm-up makes it), and kept as long as its elements."""
    elements = weight.data["elements"]
    if elements not in _ready:
        found = prepare(elements, weight.data["scales"])
        if not found.eight:
            warnings.warn(
                f"{weight.site or 'experts'}: scales of a row span more than 2^{SPAN}; "
                "its FP4 elements are multiplied in bfloat16 (exact, slower)",
                stacklevel=2,
            )
        _ready[elements] = found
    return _ready[elements]


def wgmma(
    x: Rows,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """See `ref.moe_experts_rounded`; ``experts-stored@1`` in MXFP4, on Hopper."""
    up, down = _packed(w13), _packed(w2)
    if not (up.eight and down.eight):
        return _call(x, ids, weights, up, down, w2, shared, limit, None)
    tile = wgmma_for(ids.numel(), len(w2.parts), x.shape[1], down.words.shape[1] * 4)
    return _call(x, ids, weights, up, down, w2, shared, limit, tile)


def portable(
    x: Rows,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """See `ref.moe_experts_rounded`; ``experts-stored@1`` in MXFP4, any card with e4m3."""
    up, down, tile = _packed(w13), _packed(w2), None
    if x.device.type == "cuda" and up.eight and down.eight:
        tile = portable_for(ids.numel(), len(w2.parts))
    return _call(x, ids, weights, up, down, w2, shared, limit, tile)


def rounded(x: Tensor, w13: PackedWeight) -> Rounded:
    """What `wgmma` and `portable` do to x [T, D] first, for ranks that send it."""
    return Rounded(*quantise(x, mixed=True), x.dtype, order=Order.MIXED)


def wide(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """`portable` with products in bfloat16, for cards without e4m3 instructions."""
    return _call(x, ids, weights, _packed(w13), _packed(w2), w2, shared, limit, None, wide=True)


def _call(
    x: Rows, ids: Tensor, weights: Tensor, up: Mx, down: Mx, w2: PackedWeight,
    shared: Tensor | None, limit: float, tile: TableTile | None, *,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    ids, weights = ids.contiguous(), weights.float().contiguous()
    shared = None if shared is None else shared.contiguous()
    return experts(
        x, ids, weights, up, down, shared, experts=len(w2.parts), limit=limit, tile=tile, wide=wide
    )
