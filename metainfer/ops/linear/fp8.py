"""Calls of the FP8 kernels: quantise, stream the weight for few tokens, tile for many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from metainfer.core.errors import InternalError
from metainfer.ops.launch import ceil_div, power_of_2, prepared
from metainfer.ops.linear import triton_fp8
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.tiles import (
    BLOCK,
    STREAM_ROWS,
    ChunkTile,
    StreamTile,
    chunk_for,
    chunk_splits,
    has_e4m3,
    stream_for,
    stream_splits,
)

quantise_kernel = prepared(triton_fp8.quantise_kernel)
stream_kernel = prepared(triton_fp8.stream_kernel)
chunk_kernel = prepared(triton_fp8.chunk_kernel)


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """The card's; None for the interpreter's host."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@cache
def units(device: torch.device) -> int:
    """Multiprocessors; the interpreter's host has none and stands for a small card."""
    if device.type != "cuda":
        return 8
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def parts_of(out: Tensor, weight: Tensor, tiles: int, splits: int) -> tuple[Tensor, Tensor]:
    """Where `triton_parts.finish` leaves sums of parts [splits, *out.shape] float32 and counts
    arrivals [tiles]; neither is used for one part."""
    if splits == 1:
        return out, out
    parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
    return parts, _counters(out.device, weight.data_ptr(), tiles)


@cache
def _counters(device: torch.device, weight: int, tiles: int) -> Tensor:
    """Of the weight stored at `weight`: zero before and after every call."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def wide_type(device: torch.device) -> tl.dtype:
    """The type in which e4m3 numbers are multiplied where they are not multiplied as such."""
    return tl.bfloat16 if device.type == "cuda" else tl.float32


def quantise(x: Tensor, *, mixed: bool = False, wide: bool = False) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (e4m3 [T, K], scales [K / 128, T] float32), 2^e per token and 128 channels.

    `wide`: the same numbers as bfloat16 (float32 off a card). `mixed`: channels of a block stand in
    the order that packed FP4 unpacks to, and scales are [T, K / 128].
    """
    (rows, k), device = x.shape, x.device
    kind = torch.float8_e4m3fn
    if wide:
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.empty((rows, k), dtype=kind, device=device)
    shape = (rows, k // BLOCK) if mixed else (k // BLOCK, rows)
    scales = torch.empty(shape, dtype=torch.float32, device=device)
    if rows:
        many = rows >= 1024  # enough programs for the card, so each moves more
        per = 16 if many else 4
        blocks = math.gcd(k // BLOCK, 4) if many else 1
        strides = scales.stride() if mixed else scales.stride()[::-1]
        quantise_kernel[(ceil_div(rows, per), k // BLOCK // blocks)](
            x, q, scales, rows, x.stride(0), *strides, k, per, blocks, mixed,
            num_warps=8 if many else 4,
        )  # fmt: skip
    return q, scales


def stream(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    tile: StreamTile | None = None,
    splits: int = 0,
    wide: bool = False,
) -> Tensor:
    """``x @ W^T`` for few tokens: x [T <= 32, K], weight e4m3 [N, K], scale [N / 128, K / 128] as
    float32 or the bytes of 2^(byte - 127) -> [T, N] in x's dtype. `wide`: products in bfloat16,
    the weight as e4m3 or its bytes."""
    rows, (n, k) = x.shape[0], weight.shape
    if rows > STREAM_ROWS or k % BLOCK:
        raise InternalError(f"the streaming product serves {STREAM_ROWS} rows, got {rows} x {k}")
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    device = x.device
    tile = tile or stream_for(capability(device), rows, n * k)
    tiles = ceil_div(n, tile.n)
    splits = splits or stream_splits(tiles, k, units(device))
    parts, counters = parts_of(out, weight, tiles, splits)
    stream_kernel[(tiles, splits)](
        x, weight, scale, out, parts, counters, rows, x.stride(0), n, scale.stride(0),
        k, max(16, power_of_2(rows)), tile.n, splits, k // BLOCK // splits,
        scale.dtype == torch.uint8, device.type == "cuda" and not wide, wide_type(device),
        tile.early, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=tile.early > 0,
    )  # fmt: skip
    return out


def chunk(
    q: Tensor,
    q_scales: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype,
    tile: ChunkTile | None = None,
    splits: int = 0,
    wide: bool = False,
) -> Tensor:
    """``x @ W^T`` of activations quantised by `quantise` (not mixed): [T, N] in `dtype`. `wide`:
    they were quantised so, and products are in bfloat16."""
    (rows, k), n, device = q.shape, weight.shape[0], q.device
    out = torch.empty((rows, n), dtype=dtype, device=device)
    if rows == 0:
        return out
    tile = tile or chunk_for(capability(device), wide, rows)
    tiles = ceil_div(rows, tile.m) * ceil_div(n, tile.n)
    splits = splits or chunk_splits(tiles, k, units(device))
    parts, counters = parts_of(out, weight, tiles, splits)
    left, right = q, weight
    if tile.tma:
        left = TensorDescriptor.from_tensor(q, [tile.m, BLOCK])
        right = TensorDescriptor.from_tensor(weight, [tile.n, BLOCK])
    options = {"maxnreg": tile.registers} if tile.registers else {}
    chunk_kernel[(tiles, splits)](
        left, q_scales, right, scale, out, parts, counters, rows, q_scales.stride(0), n,
        scale.stride(0), k, tile.m, tile.n, tile.group, splits, scale.dtype == torch.uint8,
        tile.tma, device.type == "cuda" and not wide, wide_type(device), num_warps=tile.warps,
        num_stages=tile.stages, **options,
    )  # fmt: skip
    return out


def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    stream_tile: Mapping[str, Any] | None = None,
    chunk_tile: Mapping[str, Any] | None = None,
    wide: bool = False,
) -> Tensor:
    """``x @ W^T`` in the recipe's arithmetic: x [T, K], ``stored@1`` FP8 weight [N, K] -> [T, N].

    Tensors laid end to end begin at multiples of 128 rows, and K is one too. The tiles: fields of
    `StreamTile` and `ChunkTile`, the card's own where they are None. `wide`: products in bfloat16.
    """
    if any(rows % BLOCK for rows in weight.parts[:-1]):
        raise InternalError(f"FP8 tensors of {weight.parts} rows do not meet at blocks of {BLOCK}")
    elements, scales = weight.data["elements"], weight.data["scales"]
    if has_e4m3(capability(x.device)):
        elements = elements.view(torch.float8_e4m3fn)
    if x.shape[0] <= STREAM_ROWS:
        streamed = StreamTile(**stream_tile) if stream_tile else None
        return stream(x, elements, scales, tile=streamed, wide=wide)
    tile = ChunkTile(**chunk_tile) if chunk_tile else None
    return chunk(*quantise(x, wide=wide), elements, scales, dtype=x.dtype, tile=tile, wide=wide)


linear_wide = partial(linear, wide=True)
"""`linear` with products in bfloat16, for cards without e4m3 instructions."""
