"""Calls of the hyper-connection kernels: two launches a site, a third that mixes many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.ops.hyper import triton as kernels
from metainfer.ops.hyper import triton_direct
from metainfer.ops.hyper.tiles import (
    MIX_LANES,
    SHORT_ROWS,
    finish_warps,
    product_lanes,
    splits_for,
    tile_for,
)
from metainfer.ops.launch import ceil_div, power_of_2, prepared
from metainfer.ops.linear.fp8 import capability, units

finish_kernel, mix_kernel = prepared(kernels.finish_kernel), prepared(kernels.mix_kernel)
product_kernel = prepared(triton_direct.product_kernel)
step_kernel = prepared(kernels.step_kernel)
direct_step_kernel = prepared(triton_direct.step_kernel)

Site = tuple[Tensor, Tensor, Tensor]
"""fn, base, scale."""

Block = tuple[Tensor, Tensor, Tensor]
"""y, post, comb."""


def hyper_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ref.hyper_pre`."""
    site = (fn, base, scale)
    return _step(streams, None, site, norm_weight, norm_eps=norm_eps, eps=eps, iters=iters)[1:]


def hyper_mix_pre(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ref.hyper_mix_pre`."""
    block: Block | None = (y, post, comb)
    if streams.shape[0] > SHORT_ROWS:
        streams, block = hyper_mix(streams, y, post, comb), None
    site = (fn, base, scale)
    return _step(streams, block, site, norm_weight, norm_eps=norm_eps, eps=eps, iters=iters)


def hyper_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    """See `ref.hyper_head`."""
    site = (fn, base, scale)
    return _step(streams, None, site, None, norm_eps=norm_eps, eps=eps, iters=1)[1]


def hyper_mix(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `ref.hyper_mix`."""
    rows, n, d = _shape(streams, y)
    mixed = torch.empty_like(streams)
    if rows:
        mix_kernel[(rows, ceil_div(d, MIX_LANES))](
            streams, y, post, comb, mixed, y.stride(0), n, d, MIX_LANES, num_warps=4
        )
    return mixed


def _shape(streams: Tensor, y: Tensor) -> tuple[int, int, int]:
    if not streams.is_contiguous() or y.stride(1) != 1:
        raise InternalError(
            f"hyper-connections want streams end to end and packed rows, got strides "
            f"{streams.stride()} and {y.stride()}"
        )
    rows, n, d = streams.shape
    return rows, n, d


def _step(
    streams: Tensor,
    block: Block | None,
    site: Site,
    norm_weight: Tensor | None,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(streams after `block`'s mix, x, post, comb); without a norm weight x alone is made."""
    fn, base, scale = site
    head = norm_weight is None
    y, post, comb = block if block is not None else (streams[:, 0], streams, streams)
    (rows, n, d), device = _shape(streams, y), streams.device
    mixed = streams if block is None else torch.empty_like(streams)
    x = torch.empty((rows, d), dtype=streams.dtype, device=device)
    post_out = torch.empty((rows, n), dtype=torch.float32, device=device)
    comb_out = torch.empty((rows, n, n), dtype=torch.float32, device=device)
    if rows == 0:
        return mixed, x, post_out, comb_out
    tile, lanes = tile_for(rows), product_lanes(fn.shape[0])
    # Two ways to cut: the same channels of all streams, or the streams end to end.
    direct = streams.dtype == torch.bfloat16
    apart = direct and rows > SHORT_ROWS
    early = direct and tile.early and (capability(device) or (0, 0)) >= (9, 0)
    blocks, chunks = ceil_div(rows, tile.m), ceil_div(n * d if apart else d, tile.d)
    splits = splits_for(tile, blocks, chunks, units(device))
    steps = ceil_div(chunks, splits)
    parts = torch.empty((splits, rows, lanes), dtype=torch.float32, device=device)
    sizes = (fn.shape[0], lanes, tile.m, tile.d)
    if apart:
        product_kernel[(blocks, splits)](
            streams, fn, parts, rows, steps, n * d, *sizes, tile.down, num_warps=tile.warps
        )
    else:
        kernel = direct_step_kernel if direct else step_kernel
        form = (tile.across, early) if direct else ()
        kernel[(blocks, splits)](
            streams, y, post, comb, mixed, fn, parts, rows, splits, steps, y.stride(0), n, d,
            *sizes, block is not None, *form, num_warps=tile.warps, launch_pdl=early,
        )  # fmt: skip
    ends, width = 0 if head else ceil_div(rows, tile.batch), power_of_2(d)
    finish_kernel[(ends + rows,)](
        mixed, parts, base, scale, base if norm_weight is None else norm_weight, x, post_out,
        comb_out, rows, splits, norm_eps, eps, iters, n, d, width, fn.shape[0], lanes, tile.splits,
        tile.batch, head, early, num_warps=finish_warps(width), launch_pdl=early,
    )  # fmt: skip
    return mixed, x, post_out, comb_out
