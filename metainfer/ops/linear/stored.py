"""``stored@1``: every tensor of a matrix as the checkpoint holds it, and how values are read back.

Plain numbers: ``weight`` [N, K] in the stored type. Block formats: ``elements`` [N, bytes of a
row] uint8, ``scales`` [sum of ceil(n / block rows), ceil(K / block columns)] in the stored type,
and with a second scale ``second`` [tensors] float32. Tensors keep their own rows of scales, so
blocks never reach across two. Values are those of `formats.block_codecs.decode` in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from metainfer.core.errors import InternalError, ModelError
from metainfer.formats import elements
from metainfer.formats.block_codecs import BlockTensor, expand
from metainfer.formats.blocks import BlockFormat
from metainfer.formats.quant import RawTensor, Stored, scheme_name
from metainfer.formats.schemes import is_quantised
from metainfer.ops.linear.packed import PackedWeight, joint_shape

LAYOUT = "stored@1"
TILE_ELEMENTS = 1 << 23
"""Elements that are widened at once: 32 MiB in float32."""


def pack(
    raws: Sequence[Stored],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    site: str = "",
) -> PackedWeight:
    """``stored@1``: `raws` laid end to end along N, all of one scheme.

    Raises:
        ModelError: the tensors are stored in different schemes, or their widths differ.
        InternalError: a scheme that the layout does not list.
    """
    shape = joint_shape(raws)
    schemes = sorted({scheme_name(raw) for raw in raws})
    if len(schemes) > 1:
        raise ModelError(
            f"the matrix of {site or 'one site'} mixes {' and '.join(schemes)}; "
            f"{LAYOUT} keeps one format in a matrix.",
            "Choose a layout that decodes at load, such as dense@1.",
            code="mixed_formats",
        )
    moved = bias.to(device=device, dtype=dtype) if bias is not None else None
    blocks = [raw for raw in raws if isinstance(raw, BlockTensor)]
    plain = [raw.data for raw in raws if isinstance(raw, RawTensor)]
    if plain:
        if is_quantised(schemes[0]):
            raise InternalError(f"{LAYOUT} does not hold {schemes[0]}")
        data = {"weight": torch.cat(plain).to(device)}
    else:
        data = {
            "elements": torch.cat([raw.data for raw in blocks]).to(device),
            "scales": torch.cat([raw.scale for raw in blocks]).to(device),
        }
        seconds = [raw.second for raw in blocks if raw.second is not None]
        if seconds:
            data["second"] = torch.stack(seconds).to(device)
    return PackedWeight(
        LAYOUT,
        shape,
        data,
        moved,
        site,
        format=blocks[0].format if blocks else None,
        parts=tuple(raw.shape[0] for raw in raws),
        dtype=dtype,
    )


def part(weight: PackedWeight, index: int, first: int = 0, count: int | None = None) -> Tensor:
    """Rows ``first .. first + count`` of tensor `index`, float32 [count, K]; all by default.

    `first` must stand at the border of a block.
    """
    row, scale_row = _starts(weight)[index]
    count = weight.parts[index] - first if count is None else count
    fmt = weight.format
    if fmt is None:
        return weight.data["weight"][row + first : row + first + count].float()
    block = fmt.block[0]
    held = weight.data["scales"]
    begin = scale_row + first // block
    scales = _scales(
        fmt, held[begin : begin + -(-count // block)], weight.data.get("second"), index
    )
    stored = weight.data["elements"][row + first : row + first + count]
    return _scaled(_values(stored, fmt, weight.shape[1]), scales, fmt)


def tiles(weight: PackedWeight, most: int = TILE_ELEMENTS) -> Iterator[tuple[int, Tensor]]:
    """The matrix in runs of rows: (first row, float32 [rows, K] of about `most` elements)."""
    block = weight.format.block[0] if weight.format else 1
    step = max(most // max(weight.shape[1], 1) // block, 1) * block
    row = 0
    for index, rows in enumerate(weight.parts):
        for first in range(0, rows, step):
            tile = part(weight, index, first, min(step, rows - first))
            yield row + first, tile
        row += rows


def matrix(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The whole matrix [N, K], rounded once to `dtype`."""
    if weight.format is None:
        return weight.data["weight"].to(dtype)
    whole = weight.data["elements"].new_empty(weight.shape, dtype=dtype)
    for row, tile in tiles(weight):
        whole[row : row + tile.shape[0]] = tile
    return whole


def rows_of(weight: PackedWeight, ids: Tensor) -> Tensor:
    """Rows `ids` [T] of a matrix of one tensor, [T, K] in the model's type."""
    assert weight.dtype is not None
    fmt = weight.format
    if fmt is None:
        return weight.data["weight"][ids].to(weight.dtype)
    if len(weight.parts) != 1:
        raise InternalError("rows are read from a matrix of one tensor")
    scales = weight.data["scales"][ids // fmt.block[0]]
    values = _values(weight.data["elements"][ids], fmt, weight.shape[1])
    wide = _scales(fmt, scales, weight.data.get("second"), 0)
    return _scaled(values, wide, fmt, block_rows=1).to(weight.dtype)


def _scaled(values: Tensor, scales: Tensor, fmt: BlockFormat, block_rows: int = 0) -> Tensor:
    """`values` [n, K] float32 times their blocks' scales, in place."""
    n, k = values.shape
    rows, columns = block_rows or fmt.block[0], fmt.block[1]
    if n % rows or k % columns:
        return values.mul_(expand(scales, (rows, columns), n, k))
    blocks = values.view(n // rows, rows, k // columns, columns)
    blocks.mul_(scales[:, None, :, None])
    return values


def _scales(fmt: BlockFormat, stored: Tensor, seconds: Tensor | None, index: int) -> Tensor:
    """What elements are multiplied by, float32."""
    if fmt.scale == "F8_E8M0":
        return _e8m0(stored.device)[stored.int()]
    scales = stored if fmt.scale == "F32" else elements.e4m3_decode(stored)
    if seconds is None:
        return scales
    return scales * seconds[index] if fmt.second == "multiply" else scales / seconds[index]


def _values(stored: Tensor, fmt: BlockFormat, k: int) -> Tensor:
    """Elements without their scales, float32 [n, K]."""
    if fmt.element == "e4m3":
        return stored.view(torch.float8_e4m3fn).float()
    flat = stored.contiguous().view(-1)
    if flat.numel() % 2 or flat.storage_offset() % 2:  # no whole pairs of bytes
        return elements.e2m1_decode(elements.e2m1_unpack(stored))
    pairs = flat.view(torch.uint16).int()
    return _e2m1_pairs(stored.device).index_select(0, pairs).view(stored.shape[0], k)


@lru_cache(maxsize=8)
def _e2m1_pairs(device: torch.device) -> Tensor:
    """The four values of every two bytes, float32 [65536, 4]: one look-up instead of four."""
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(-1, 2)
    return elements.e2m1_decode(elements.e2m1_unpack(pairs)).to(device)


@lru_cache(maxsize=8)
def _e8m0(device: torch.device) -> Tensor:
    return elements.e8m0_decode(torch.arange(256, dtype=torch.uint8)).to(device)


def _starts(weight: PackedWeight) -> tuple[tuple[int, int], ...]:
    """(first row, first row of scales) of every tensor."""
    return _sums(weight.parts, weight.format.block[0] if weight.format else 1)


@lru_cache(maxsize=4096)
def _sums(parts: tuple[int, ...], block: int) -> tuple[tuple[int, int], ...]:
    rows = itertools.accumulate(parts, initial=0)
    scales = itertools.accumulate((-(-n // block) for n in parts), initial=0)
    return tuple(zip(rows, scales, strict=True))
