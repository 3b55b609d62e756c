"""Cutting block-scaled matrices for ranks, with neutral padding, and proof that it is neutral.

Padding is zero elements and scales of one, always written: a kernel that reads it adds zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.formats.block_codecs import BlockTensor, decode
from metainfer.formats.blocks import PER_BYTE, UNIT_SCALE
from metainfer.formats.extents import Shard
from metainfer.formats.quant import RawTensor
from metainfer.formats.schemes import BLOCKS


def take(tensor: BlockTensor, dim: int, shard: Shard) -> BlockTensor:
    """Rows (`dim` 0) or columns (1) of one rank, padded to the executed extent.

    The cut must fall on a block boundary and the executed extent hold whole blocks (`extents.split`
    sees to both); the result is a copy.
    """
    fmt, block = tensor.format, tensor.format.block[dim]
    start, extent = shard.start, shard.extent
    stop = start + extent.logical
    cut_inside = (start % block and extent.logical) or (stop % block and stop != tensor.shape[dim])
    if cut_inside or extent.executed % block or stop > tensor.shape[dim]:
        raise ModelError(
            f"Elements {start}..{stop} of {tensor.shape[dim]}, executed as {extent.executed}, "
            f"are not whole blocks of {block}.",
            "Split with padding to whole blocks.",
            code="shard_block",
        )
    shape = (extent.executed, tensor.shape[1]) if dim == 0 else (tensor.shape[0], extent.executed)
    per = PER_BYTE[fmt.element] if dim == 1 else 1
    data = torch.zeros(fmt.data_shape(*shape), dtype=torch.uint8, device=tensor.data.device)
    part = tensor.data.narrow(dim, start // per, extent.logical // per)
    data.narrow(dim, 0, extent.logical // per).copy_(part)
    scale = tensor.scale.new_full(fmt.scale_shape(*shape), UNIT_SCALE[fmt.scale])
    blocks = -(-extent.logical // block)
    first = start // block if blocks else 0
    scale.narrow(dim, 0, blocks).copy_(tensor.scale.narrow(dim, first, blocks))
    return BlockTensor(fmt, shape, data, scale, tensor.second)


def take_raw(raw: RawTensor, dim: int, shard: Shard) -> RawTensor:
    """Rows (`dim` 0) or columns (1) of one rank of a dense or ggml tensor, padded with zeros to the
    executed extent; a copy.

    Columns of ggml's blocks are cut between blocks (`ModelError`, ``shard_block``); a block of zero
    bytes has scale zero.
    """
    start, count, whole = shard.start, shard.extent.logical, shard.extent.executed
    elements, size = BLOCKS.get(raw.scheme, (1, 1)) if dim == 1 else (1, 1)
    if start % elements or count % elements or whole % elements:
        raise ModelError(
            f"Elements {start}..{start + count} of a {raw.scheme} tensor, executed as "
            f"{shard.extent.executed}, are not whole blocks of {elements}.",
            "Choose another number of ranks.",
            code="shard_block",
        )
    shape, extent = list(raw.shape), list(raw.data.shape)
    shape[dim], extent[dim] = whole, whole // elements * size
    data = raw.data.new_zeros(extent)
    held = count // elements * size
    data.narrow(dim, 0, held).copy_(raw.data.narrow(dim, start // elements * size, held))
    return RawTensor(raw.scheme, tuple(shape), data)


def pad_scale_columns(tensor: BlockTensor, tile: int) -> Tensor:
    """The scales with columns added up to a multiple of `tile`, all of them scales of one."""
    rows, columns = tensor.scale.shape
    wide = -(-columns // tile) * tile
    scale = tensor.scale.new_full((rows, wide), UNIT_SCALE[tensor.format.scale])
    scale[:, :columns] = tensor.scale
    return scale


def check_padding(tensor: BlockTensor, logical: tuple[int, int], name: str) -> None:
    """`ModelError` (``dirty_padding``) unless all outside `logical` [N, K] is neutral."""
    fmt, (n, k) = tensor.format, logical
    per = PER_BYTE[fmt.element]
    dirty = int((tensor.data[n:] != 0).sum()) + int((tensor.data[:n, -(-k // per) :] != 0).sum())
    rows, columns = fmt.scale_shape(n, k)
    unit = UNIT_SCALE[fmt.scale]
    scales = int((tensor.scale[rows:] != unit).sum())
    scales += int((tensor.scale[:rows, columns:] != unit).sum())
    if dirty or scales:
        raise ModelError(
            f"The padding of {name!r} ({list(logical)} executed as {list(tensor.shape)}) holds "
            f"{dirty} non-zero bytes and {scales} scales that are not one.",
            "This is a defect of the loader; report it.",
            code="dirty_padding",
        )


def check_product(
    tensor: BlockTensor, product: Callable[[Tensor], Tensor], name: str, tolerance: float = 1e-2
) -> None:
    """Run a kernel's `product` (x [T, K] to [T, N]) once and compare it with the reference.

    x is a fixed pattern of small whole numbers; the reference is float64. `ModelError`
    (``wrong_product``) on NaN or an error above `tolerance` of the largest result.
    """
    k = tensor.shape[1]
    grid = torch.arange(4 * k, device=tensor.data.device).reshape(4, k)
    x = (grid * 7 % 5 - 2).to(torch.float32)
    expected = x.double() @ decode(tensor, torch.float64).T
    error = (product(x).double() - expected).abs().amax() if expected.numel() else 0.0
    largest = float(expected.abs().amax()) if expected.numel() else 0.0
    if not float(error) <= tolerance * largest:
        raise ModelError(
            f"The kernel for {name!r} {list(tensor.shape)} is off by {float(error):.3g} where the "
            f"largest result is {largest:.3g}.",
            "Choose another implementation of this op, and report the defect.",
            code="wrong_product",
        )
