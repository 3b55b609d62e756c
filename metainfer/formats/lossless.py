"""Conversions between block formats that change no value, or a refusal that says why.

MXFP4 to NVFP4 keeps every element's four bits and writes the block's power of two as an e4m3
scale times one per-tensor power of two. e4m3 holds 18 powers of two (2^-9 .. 2^8), so a tensor is
exact when the exponents of its scales span at most 17. Blocks of zeros do not count: any scale
serves them. Every result is proved equal, bit by bit, before it is given out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metainfer.core.errors import InternalError, ModelError
from metainfer.formats import elements
from metainfer.formats.block_codecs import BlockTensor, block_scales, decode, encode, expand
from metainfer.formats.blocks import MXFP4, NVFP4, BlockFormat

#: Exponents of the powers of two that e4m3 holds, subnormals included.
E4M3_LOW, E4M3_HIGH = -9, 8
#: Largest span of MXFP4 exponents that one NVFP4 tensor holds.
MAX_SPAN = E4M3_HIGH - E4M3_LOW
# Exponents of e2m1 relative to e4m3's: 6 * 2^6 = 384 fits, 0.5 * 2^-8 = 2^-9 is the smallest.
_FP8_TOP, _FP8_BOTTOM = 6, -8


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 or float64 tensors are equal bit for bit (signs of zero included)."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int64
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def live_exponents(tensor: BlockTensor, name: str) -> Tensor:
    """Exponents (int32, 1-D) of the MXFP4 blocks that hold anything but zeros.

    `ModelError` when a scale is NaN.
    """
    if bool((tensor.scale == elements.E8M0_NAN).any()):
        raise ModelError(
            f"{name!r} has scales that are NaN (byte 255); it has no value to keep.",
            "The file is damaged; download it again.",
            code="bad_scale",
        )
    return tensor.scale[_live(tensor)].to(torch.int32) - 127


def _live(tensor: BlockTensor) -> Tensor:
    """Which blocks hold anything but zeros of either sign."""
    rows, columns = tensor.scale.shape
    width = tensor.format.block[1] // 2
    padded = tensor.data.new_zeros((rows, columns * width))
    padded[:, : tensor.data.shape[1]] = tensor.data & 0x77  # without the signs
    if not padded.numel():
        return torch.zeros((rows, columns), dtype=torch.bool)
    return (padded != 0).reshape(rows, columns, width).any(dim=-1)


def shared_exponent(tensors: Sequence[BlockTensor], names: Sequence[str]) -> int:
    """The exponent of one ``weight_scale_2`` for all `tensors` (fused matrices share it).

    The largest scale becomes 2^8, so that the others stay normal e4m3 numbers where they can.
    `ModelError` (``not_lossless``) naming tensors and span when no exponent serves all.
    """
    found = [live_exponents(t, name) for t, name in zip(tensors, names, strict=True)]
    live = torch.cat(found) if found else torch.empty(0, dtype=torch.int32)
    if not live.numel():
        return 0
    low, high = int(live.min()), int(live.max())
    if high - low > MAX_SPAN:
        raise _refused(
            f"scale exponents of {', '.join(map(repr, names))} span {high - low} "
            f"(2^{low} .. 2^{high}), NVFP4 holds {MAX_SPAN}"
        )
    return max(high - E4M3_HIGH, -126)  # a normal float32


def mxfp4_to_nvfp4(tensor: BlockTensor, name: str, exponent: int | None = None) -> BlockTensor:
    """`tensor` (MXFP4) as NVFP4, equal in every bit of every decoded value.

    `exponent`: that of ``weight_scale_2``, from `shared_exponent`; by default this tensor's own.
    """
    if exponent is None:
        exponent = shared_exponent([tensor], [name])
    n, k = tensor.shape
    relative = tensor.scale.to(torch.int32) - 127 - exponent
    relative = relative.clamp(E4M3_LOW, E4M3_HIGH)  # moves blocks of zeros, or fails below
    codes = elements.e4m3_encode(elements.power_of_two(relative, torch.float32))
    columns = NVFP4.scale_shape(n, k)[1]
    scale = codes.repeat_interleave(2, dim=1)[:, :columns].contiguous()
    second = torch.tensor(2.0**exponent, dtype=torch.float32)
    result = BlockTensor(NVFP4, (n, k), tensor.data, scale, second)
    _prove_scales(tensor, result, name)
    return result


def mxfp4_to_fp8(tensor: BlockTensor, fmt: BlockFormat, name: str) -> BlockTensor:
    """`tensor` (MXFP4) as block FP8 with e8m0 scales, equal in every bit of every decoded value.

    Exact when the exponents inside each block of `fmt` span at most 14: with the block's scale
    2^6 below its largest exponent, 6 * 2^6 = 384 and 0.5 * 2^-8 = 2^-9 are both e4m3 numbers.
    """
    live_exponents(tensor, name)  # refuses NaN
    n, k = tensor.shape
    exponent = torch.where(_live(tensor), tensor.scale.to(torch.int32) - 127, -1000)
    rows, columns = fmt.block[0], fmt.block[1] // MXFP4.block[1]
    if fmt.block[1] % MXFP4.block[1] or fmt.scale != "F8_E8M0":
        raise ModelError(
            f"MXFP4 cannot be recoded as {fmt.identifier}.",
            "Use blocks that are a multiple of 32 columns, with e8m0 scales.",
            code="layout_mismatch",
        )
    shape = fmt.scale_shape(n, k)
    grid = exponent.new_full((shape[0] * rows, shape[1] * columns), -1000)
    grid[:n, : exponent.shape[1]] = exponent
    blocks = grid.reshape(shape[0], rows, shape[1], columns)
    top = blocks.amax(dim=(1, 3)) if grid.numel() else grid.new_zeros(shape)
    bottom = torch.where(blocks == -1000, 1000, blocks)
    span = top - (bottom.amin(dim=(1, 3)) if grid.numel() else 0)
    if bool((span > _FP8_TOP - _FP8_BOTTOM).any()):
        raise _refused(
            f"scale exponents of {name!r} span {int(span.max())} inside a "
            f"{rows}x{fmt.block[1]} block, FP8 holds {_FP8_TOP - _FP8_BOTTOM}"
        )
    base = torch.where(top == -1000, 0, (top - _FP8_TOP).clamp(-127, 127))
    scale = (base + 127).to(torch.uint8)
    wide = expand(elements.power_of_two(base, torch.float64), fmt.block, n, k)
    data = elements.e4m3_encode(decode(tensor, torch.float64) / wide)
    result = BlockTensor(fmt, (n, k), data, scale)
    _prove(tensor, result, name)
    return result


def recode(tensor: BlockTensor, fmt: BlockFormat, name: str, *, lossless: bool) -> BlockTensor:
    """`tensor` in `fmt`: exact where that is possible, else rounded; refused if `lossless`."""
    if tensor.format.identifier == fmt.identifier:
        return tensor
    from_mxfp4 = tensor.format.identifier == MXFP4.identifier
    try:
        if from_mxfp4 and fmt.identifier == NVFP4.identifier:
            return mxfp4_to_nvfp4(tensor, name)
        if from_mxfp4 and fmt.element == "e4m3" and fmt.scale == "F8_E8M0":
            return mxfp4_to_fp8(tensor, fmt, name)
    except ModelError as error:
        if lossless or error.code != "not_lossless":
            raise
    values = decode(tensor, torch.float64)
    result = encode(values, fmt)
    if lossless and not same_bits(values, decode(result, torch.float64)):
        raise _refused(f"{fmt.name} does not hold every value of {name!r} ({tensor.format.name})")
    return result


def _prove_scales(source: BlockTensor, result: BlockTensor, name: str) -> None:
    """The same elements under the same scales, bit for bit, give the same products.

    Blocks of zeros need a finite scale only. Decoding everything would cost 16 times as much.
    """
    columns = result.scale.shape[1]
    live = _live(source).repeat_interleave(2, dim=1)[:, :columns]
    for dtype in (torch.float32, torch.float64):
        before = block_scales(source, dtype).repeat_interleave(2, dim=1)[:, :columns]
        after = block_scales(result, dtype)
        same = same_bits(before[live], after[live]) and bool(torch.isfinite(after).all())
        if result.data is not source.data or not same:
            raise InternalError(f"{name!r}: {result.format.name} differs from its source.")


def _prove(source: BlockTensor, result: BlockTensor, name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        if not same_bits(decode(source, dtype), decode(result, dtype)):
            raise InternalError(f"{name!r}: {result.format.name} differs from its source.")


def _refused(what: str) -> ModelError:
    return ModelError(
        f"Not lossless: {what}.",
        "Leave this tensor in its own format, or convert without --lossless.",
        code="not_lossless",
    )
