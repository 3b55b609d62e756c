"""Cutting stored matrices for ranks, with neutral padding.

Padding is zero elements and scales of one, always written: a kernel that reads it adds zero.
"""

from __future__ import annotations

import torch

from metainfer.core.errors import ModelError
from metainfer.formats.block_codecs import BlockTensor
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
