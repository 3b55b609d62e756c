"""Calls of the expert products by the block-scaled instruction of 12.x (`cuda_experts.cu`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.kernels import cubin, driver
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.moe_experts.cuda_tiles import MX_CHUNK, MX_TILES, MxTile, mx_for
from metainfer.ops.moe_experts.plan import sorted_plan
from metainfer.ops.moe_experts.rounded import Order, Rounded, Rows, as_read
from metainfer.ops.moe_experts.triton_combine import combine_kernel

BLOCK = 128
LANES = 32


class Product(ctypes.Structure):
    """``Product`` of the source: addresses, then numbers."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "x", "x_scales", "order", "table", "routes", "w", "w_scales", "out", "out_scales"
        )),
        ("limit", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("k", "n", "top")),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mx:
    """A packed matrix as stored: `elements` uint8 [R, K / 2], `scales` uint8 [R, K / 32]."""

    elements: Tensor
    scales: Tensor


class Kernels(Protocol):
    """The three kernels of a tile, on some device."""

    tile: MxTile

    def launch(self, name: str, grid: int, *arguments: Any) -> None: ...


class CardKernels:
    """On a card. `software`: see `MxTile.source`.

    Raises:
        CudaError: they do not compile or load here.
    """

    def __init__(self, tile: MxTile, device: int, software: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        # the instruction is one of this very capability, and its target says so
        arch = f"sm_{major}{minor}" + ("" if software else "a")
        body, verdict, _ = cubin.build(tile.source(software), arch)
        if body is None:
            remedy = "Install nvidia-cuda-nvrtc of CUDA 12.8 or newer, or the CUDA compiler."
            raise driver.CudaError(verdict.reasons[0].message, remedy)
        self.tile, self._device, self._module = tile, device, driver.Module(body)

    def launch(self, name: str, grid: int, *arguments: Any) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        shared = 0 if name == "mx_round" else self.tile.shared_bytes()
        function = self._module.function(name)
        function(grid, LANES * self.tile.warps, stream, arguments, shared)


@cache
def kernels(device: int, software: int = 0) -> Mapping[MxTile, Kernels]:
    """Those of every tile, so that the first call leaves nothing to compile.

    Raises:
        CudaError: as `CardKernels`.
    """
    return {tile: CardKernels(tile, device, software) for tile in MX_TILES}


def rounded(x: Tensor, run: Kernels) -> tuple[Tensor, Tensor]:
    """x bf16 [T, K] -> (e4m3 [T, K] in parted order, scales [T, K / 128] as bytes of 2^(b - 127)),
    both uint8: the recipe's rounding of activations."""
    rows, k = x.shape
    if x.stride(1) != 1 or x.stride(0) % 4 or x.data_ptr() % 8:  # four numbers a load
        x = x.clone(memory_format=torch.contiguous_format)
    q = torch.empty((rows, k), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, k // BLOCK), dtype=torch.uint8, device=x.device)
    addresses = [ctypes.c_uint64(each.data_ptr()) for each in (x, q, scales)]
    numbers = (ctypes.c_uint64(x.stride(0)), ctypes.c_uint32(rows), ctypes.c_uint32(k // BLOCK))
    run.launch("mx_round", triton.cdiv(scales.numel(), run.tile.warps), *addresses, *numbers)
    return q, scales


def sent_rounded(x: Tensor, run: Kernels) -> Rounded:
    """`rounded` for ranks that send it: scales as float32, as every form has them on the wire."""
    elements, scales = rounded(x, run)
    power = scales.to(torch.int32)
    bits = (power << 23) | ((power == 255).to(torch.int32) << 22)  # 2^128 says NaN
    return Rounded(
        elements.view(torch.float8_e4m3fn), bits.view(torch.float32), x.dtype, order=Order.PARTED
    )


def _entering(x: Rows, run: Kernels) -> tuple[Tensor, Tensor]:
    """What the first product reads of x: as `rounded`."""
    if not isinstance(x, Rounded):
        return rounded(x, run)
    if x.order is not Order.PARTED:
        return rounded(as_read(x), run)
    power = (x.scales.view(torch.int32) >> 23).to(torch.uint8)
    return x.elements.view(torch.uint8).contiguous(), power


def products(
    x: Rows, order: Tensor, table: Tensor, routes: Tensor, up: Mx, down: Mx, limit: float,
    run: Kernels,
) -> Tensor:  # fmt: skip
    """Both products of every pair: y [pairs, D], float32 for few and bf16 for many.

    x bf16 [T, D] or as `sent_rounded`, order [pairs] and table [blocks, 3] of `plan.sorted_plan`,
    routes [T, k] float32; up: rows [E 2F], down: rows [E D]. Rows of y without an expert are left
    as they are.

    Raises:
        InternalError: sizes that the kernels do not take.
    """
    (_, d), (pairs, top), device = x.shape, (routes.numel(), routes.shape[1]), x.device
    f = down.elements.shape[1] * 2
    n = run.tile.n
    if x.dtype != torch.bfloat16 or d % n or f % BLOCK or (2 * f) % n:
        raise InternalError(f"takes bfloat16, D in tiles of {n} and F in 128s; got {d}, {f}")
    hidden = torch.empty((pairs, f), dtype=torch.uint8, device=device)
    h_scales = torch.empty((pairs, f // BLOCK), dtype=torch.uint8, device=device)
    kind = torch.float32 if run.tile.few else torch.bfloat16
    y = torch.empty((pairs, d), dtype=kind, device=device)
    q, scales = _entering(x, run)

    def arguments(left: tuple[Tensor, Tensor], weight: Mx, out: Tensor, rows: int) -> Product:
        tensors = (*left, order, table, routes, weight.elements, weight.scales, out, h_scales)
        addresses = (each.data_ptr() for each in tensors)
        return Product(*addresses, limit or float("inf"), left[0].shape[1], rows, top)

    blocks = table.shape[0]
    run.launch("mx_up", 2 * f // n * blocks, arguments((q, scales), up, hidden, 2 * f))
    run.launch("mx_down", d // n * blocks, arguments((hidden, h_scales), down, y, d))
    return y


def experts(
    x: Rows, ids: Tensor, routes: Tensor, up: Mx, down: Mx, shared: Tensor | None = None, *,
    experts: int, limit: float = 0.0, software: int = 0,
) -> Tensor:  # fmt: skip
    """See `ref.moe_experts_rounded`: x bf16 [T, D] or as `rounding` makes it, ids [T, k] int32,
    routes [T, k] float32."""
    (tokens, d), top = x.shape, ids.shape[1]
    out = torch.empty((tokens, d), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    run = kernels(x.device.index, software)[mx_for(ids.numel(), experts)]
    order, table = sorted_plan(ids, experts, run.tile.m)
    y = products(x, order, table, routes, up, down, limit, run)
    block = 1024
    combine_kernel[(tokens, triton.cdiv(d, block))](
        y, ids, shared, out, d, top, block, shared is not None, num_warps=4
    )
    return out


def rounding(x: Tensor, w13: PackedWeight, *, software: int = 0) -> Rounded:
    """What `native` does to x [T, D] first, for ranks that send it."""
    return sent_rounded(x, kernels(x.device.index, software)[MX_CHUNK])


def native(
    x: Rows,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: Tensor | None = None,
    *,
    limit: float = 0.0,
    software: int = 0,
) -> Tensor:
    """See `ref.moe_experts_rounded`; ``experts-stored@1`` in MXFP4, on cards of capability 12.x.

    `software`: what shows on another card that all but the instruction is right.
    """
    return experts(
        x, ids.contiguous(), weights.float().contiguous(), _stored(w13), _stored(w2),
        None if shared is None else shared.contiguous(), experts=len(w2.parts), limit=limit,
        software=software,
    )  # fmt: skip


def _stored(weight: PackedWeight) -> Mx:
    return Mx(weight.data["elements"], weight.data["scales"])
