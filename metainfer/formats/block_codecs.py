"""Reference encode and decode of block FP8, MXFP4 and NVFP4 matrices in plain torch.

Decoding multiplies the element by its block's scale, in that precision, once; the scale of NVFP4
is combined with the per-tensor one first, as ModelOpt's ``NVFP4QTensor.dequantize`` and
compressed-tensors' ``_dequantize`` do. Encoding follows DeepSeek-V4's recipe for power-of-two
scales (smallest 2^e that holds the block's largest value) and ModelOpt's for NVFP4.

A block that holds NaN or an infinity gets a NaN scale: damage stays visible. A block of zeros
gets a scale of one, the neutral value of padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.formats import elements
from metainfer.formats.blocks import ELEMENT_MAX, SANE_SCALE, BlockFormat

_FP32_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A matrix [N, K] as stored.

    `data`: uint8, `format.data_shape`. `scale`: uint8 codes, or float32 where the format's scale
    is F32; `format.scale_shape`. `second`: the per-tensor float32 scalar, or None.
    """

    format: BlockFormat
    shape: tuple[int, int]
    data: Tensor
    scale: Tensor
    second: Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.shape
        scale_dtype = torch.float32 if self.format.scale == "F32" else torch.uint8
        _expect("elements", self.data, self.format.data_shape(n, k), torch.uint8)
        _expect("scales", self.scale, self.format.scale_shape(n, k), scale_dtype)
        if (self.second is None) != (self.format.second == "none"):
            raise _bad(f"{self.format.name} has second scale {self.format.second!r}")
        if self.second is not None:
            _expect("second scale", self.second, (), torch.float32)


def _bad(what: str) -> ModelError:
    return ModelError(f"{what}.", "The tensors do not belong together.", code="bad_shape")


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise _bad(f"{what} need {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")


def from_stored(
    fmt: BlockFormat, data: Tensor, scale: Tensor, second: Tensor | None = None
) -> BlockTensor:
    """A `BlockTensor` over stored tensors of any one-byte dtype; nothing is copied.

    A second scale may be a scalar or have one element.
    """
    if data.element_size() != 1 or (fmt.scale != "F32" and scale.element_size() != 1):
        raise _bad(f"{fmt.name} needs one-byte elements, not {data.dtype} with {scale.dtype}")
    if fmt.scale != "F32":
        scale = scale.view(torch.uint8)
    if second is not None and second.numel() == 1:
        second = second.reshape(())
    shape = fmt.logical_shape(tuple(data.shape))
    return BlockTensor(fmt, shape, data.view(torch.uint8), scale, second)


def block_scales(tensor: BlockTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What each block's elements are multiplied by, [ceil(N/b), ceil(K/b)]."""
    fmt = tensor.format
    if fmt.scale == "F8_E8M0":
        return elements.e8m0_decode(tensor.scale, dtype)
    if fmt.scale == "F32":
        return tensor.scale.to(dtype)
    scale = elements.e4m3_decode(tensor.scale, dtype)
    if tensor.second is None:
        return scale
    second = tensor.second.to(dtype)
    return scale * second if fmt.second == "multiply" else scale / second


def decode(tensor: BlockTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K]; `dtype` is float32 or float64."""
    fmt, (n, k) = tensor.format, tensor.shape
    if fmt.element == "e2m1":
        values = elements.e2m1_decode(elements.e2m1_unpack(tensor.data), dtype)
    else:
        values = elements.e4m3_decode(tensor.data, dtype)
    return values * expand(block_scales(tensor, dtype), fmt.block, n, k)


def expand(scales: Tensor, block: tuple[int, int], n: int, k: int) -> Tensor:
    """Scales of blocks repeated to [n, k]; edge blocks are cut."""
    rows = scales.repeat_interleave(block[0], dim=0)[:n]
    return rows.repeat_interleave(block[1], dim=1)[:, :k]


def blocked_amax(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block, [ceil(N/b), ceil(K/b)]; NaN where a block holds NaN."""
    n, k = values.shape
    rows, columns = -(-n // block[0]), -(-k // block[1])
    padded = values.new_zeros((rows * block[0], columns * block[1]))
    padded[:n, :k] = values.abs()
    if not padded.numel():
        return padded.new_zeros((rows, columns))
    return padded.reshape(rows, block[0], columns, block[1]).amax(dim=(1, 3))


def encode(
    values: Tensor, fmt: BlockFormat, *, power_of_two: bool = True, second: Tensor | None = None
) -> BlockTensor:
    """`values` [N, K] (float32 or float64) in `fmt`.

    `power_of_two` concerns fp32 scales only: 2^ceil(log2(amax/448)) if true, else amax/448.
    `second` gives NVFP4 its per-tensor scale (shared by fused matrices); by default it follows
    from this matrix alone, amax / (6 * 448) or the reciprocal.
    """
    if values.ndim != 2 or values.dtype not in (torch.float32, torch.float64):
        raise _bad(f"encoding needs a float32 or float64 matrix, not {values.dtype}")
    n, k = values.shape
    amax = blocked_amax(values, fmt.block)
    finite = torch.isfinite(amax)
    amax = torch.where(finite, amax, 0)
    if fmt.scale == "F8_E4M3":
        second = _second_scale(amax, fmt) if second is None else second.to(torch.float32)
        scale = _nvfp4_scale(amax, second, fmt)
        scale = torch.where(finite, scale, elements.E4M3_NAN)
    elif fmt.scale == "F32" and not power_of_two:
        scale = (amax / ELEMENT_MAX[fmt.element]).to(torch.float32).clamp(min=_FP32_TINY)
        scale = torch.where(amax == 0, 1.0, scale)
        scale = torch.where(finite, scale, torch.nan)
    else:
        exponent = _scale_exponent(amax, fmt)
        if fmt.scale == "F32":
            scale = elements.power_of_two(exponent, torch.float32)
            scale = torch.where(finite, scale, torch.nan)
        else:
            scale = torch.where(finite, (exponent + 127).to(torch.uint8), elements.E8M0_NAN)
    data = torch.zeros(fmt.data_shape(n, k), dtype=torch.uint8, device=values.device)
    shell = BlockTensor(fmt, (n, k), data, scale, second)
    scaled = values / expand(block_scales(shell, values.dtype), fmt.block, n, k)
    scaled = torch.nan_to_num(scaled, nan=0.0)  # its scale is NaN; the elements do not matter
    if fmt.element == "e4m3":
        data = elements.e4m3_encode(scaled)
    else:
        data = elements.e2m1_pack(elements.e2m1_encode(scaled))
    return BlockTensor(fmt, (n, k), data, scale, second)


def _scale_exponent(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """Exponents -127..127; 0 for blocks of zeros."""
    exponent = elements.ceil_exponent(amax, ELEMENT_MAX[fmt.element]).clamp(-127, 127)
    return torch.where(amax == 0, 0, exponent)


def _second_scale(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """Per-tensor scale: one for a tensor of zeros, never zero or infinite."""
    largest = amax.max() if amax.numel() else amax.new_zeros(())
    span = ELEMENT_MAX["e2m1"] * ELEMENT_MAX["e4m3"]
    if not bool(largest > 0):
        return torch.ones((), dtype=torch.float32, device=amax.device)
    ratio = largest / span if fmt.second == "multiply" else span / largest
    top = torch.finfo(torch.float32).max
    return ratio.clamp(_FP32_TINY, top).to(torch.float32)


def _nvfp4_scale(amax: Tensor, second: Tensor, fmt: BlockFormat) -> Tensor:
    """e4m3 bytes of amax / (6 * scale_2), at least 2^-9; one for blocks of zeros."""
    given = second.to(amax.dtype)
    wanted = amax / (6 * given) if fmt.second == "multiply" else given * (amax / 6)
    codes = elements.e4m3_encode(wanted.clamp(2.0**-9, 448.0))
    return torch.where(amax == 0, 0x38, codes)


def check_scales(tensor: BlockTensor, name: str) -> None:
    """`ModelError` (``bad_scale``) when a scale is NaN, infinite, negative, zero or above 1e4.

    A zero per-block scale is allowed (a block of zeros may be written so); a zero second scale
    is not: a published file had it and every weight became zero.
    """
    if tensor.format.scale == "F8_E8M0":
        # The largest byte says it all: no power of two is zero or negative, and 255 is NaN.
        largest = int(tensor.scale.max()) if tensor.scale.numel() else 0
        if largest <= 127 + int(math.log2(SANE_SCALE)):
            return
    scales = block_scales(tensor, torch.float64)
    wrong = ~torch.isfinite(scales) | (scales < 0) | (scales > SANE_SCALE)
    if bool(wrong.any()):
        row, column = (int(at) for at in wrong.nonzero()[0])
        raise _bad_scale(
            f"{int(wrong.sum())} of {scales.numel()} block scales of {name!r} are out of range; "
            f"the first is {float(scales[row, column])} at [{row}, {column}]"
        )
    second = None if tensor.second is None else float(tensor.second)
    if second is not None and not (0 < second < float("inf")):
        raise _bad_scale(f"the per-tensor scale of {name!r} is {second}")


def _bad_scale(what: str) -> ModelError:
    return ModelError(
        f"Scales out of a sane range: {what}.",
        "The file is damaged or its layout is misread; download or convert it again.",
        code="bad_scale",
    )
