"""Raw tensors and the reference arithmetic of ggml's simple block formats, in torch.

`dequantise` is bit-for-bit what `gguf.quants` computes for Q8_0, Q4_0 and Q4_1 (tests); the
encoders agree with that library's `quantize`. Block layouts: `ggml-common.h` and
`ggml-quants.c` of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.formats.block_codecs import BlockTensor, decode
from metainfer.formats.schemes import BLOCKS, bytes_per_row, is_quantised

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)

_PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored.

    Dense schemes: `data` has `shape` and the scheme's dtype. Quantised schemes: `data` is uint8
    ``[N, bytes_per_row]`` for a logical `shape` (N, K), leading dimensions flattened into N.
    """

    scheme: str
    shape: tuple[int, ...]
    data: Tensor

    def __post_init__(self) -> None:
        if is_quantised(self.scheme):
            width = bytes_per_row(self.scheme, self.shape[-1])
            expected: tuple[int, ...] = (prod(self.shape[:-1]), width)
            dtype = torch.uint8
        elif self.scheme in TORCH_DTYPES:
            expected, dtype = self.shape, TORCH_DTYPES[self.scheme]
        else:
            raise _unsupported(self.scheme, "held as a tensor")
        if tuple(self.data.shape) != expected or self.data.dtype != dtype:
            raise ModelError(
                f"A {self.scheme} tensor of shape {list(self.shape)} needs {dtype} data "
                f"{list(expected)}, not {self.data.dtype} {list(self.data.shape)}.",
                "The checkpoint does not match its header.",
                code="bad_shape",
            )


def _unsupported(scheme: str, what: str) -> ModelError:
    return ModelError(
        f"Scheme {scheme} cannot be {what}.",
        f"Supported: {', '.join([*_PLAIN, *_DECODERS])}; convert the model to one of them.",
        code="unsupported_scheme",
    )


#: A tensor as a checkpoint holds it: numbers one by one or in ggml's blocks, or block-scaled.
Stored = RawTensor | BlockTensor


def scheme_name(raw: Stored) -> str:
    """The scheme of `raw`; a block-scaled matrix is called by its format."""
    return raw.format.name if isinstance(raw, BlockTensor) else raw.scheme


def dequantise(raw: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    """`raw` as a dense tensor of its logical shape; blocks decode in float32, then one cast.

    Raises `ModelError` for schemes other than F32, F16, BF16, Q8_0, Q4_0, Q4_1 and block formats.
    """
    if isinstance(raw, BlockTensor):
        return decode(raw).to(dtype)
    if raw.scheme in _PLAIN:
        return raw.data.to(dtype)
    if raw.scheme not in _DECODERS:
        raise _unsupported(raw.scheme, "dequantised")
    if raw.data.numel() == 0:
        return torch.empty(raw.shape, dtype=dtype, device=raw.data.device)
    blocks = raw.data.reshape(-1, BLOCKS[raw.scheme][1])  # [blocks, bytes]
    return _DECODERS[raw.scheme](blocks).reshape(raw.shape).to(dtype)


def quantise(values: Tensor, scheme: str) -> RawTensor:
    """`values` [..., K] encoded as Q8_0, Q4_0 or Q4_1 by ggml's reference rounding."""
    if scheme not in _ENCODERS:
        raise _unsupported(scheme, "produced by the reference encoder")
    shape = tuple(values.shape)
    width = bytes_per_row(scheme, shape[-1])
    if values.numel() == 0:
        empty = torch.empty((prod(shape[:-1]), width), dtype=torch.uint8, device=values.device)
        return RawTensor(scheme, shape, empty)
    blocks = values.to(torch.float32).reshape(-1, BLOCKS[scheme][0])  # [blocks, 32]
    data = _ENCODERS[scheme](blocks)  # [blocks, bytes]
    return RawTensor(scheme, shape, data.reshape(-1, width))


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 number at byte `start` of every block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[blocks, 16] bytes to [blocks, 32]: all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1).float()


def _decode_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _decode_q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8.0)


def _decode_q4_1(blocks: Tensor) -> Tensor:
    # Two roundings, as the reference has; a fused multiply-add would give other last bits.
    product = _half(blocks, 0) * _nibbles(blocks[:, 4:])
    return product + _half(blocks, 2)


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)


def _half_bytes(value: Tensor) -> Tensor:
    return value.to(torch.float16).view(torch.uint8)  # [blocks, 2]


def _pack(levels: Tensor) -> Tensor:
    """Levels [blocks, 32] in 0..15 to bytes [blocks, 16]."""
    q = levels.clamp(0, 15).to(torch.uint8)
    return q[:, :16] | (q[:, 16:] << 4)


def _encode_q8_0(values: Tensor) -> Tensor:
    scale = values.abs().amax(dim=1, keepdim=True) / 127
    scaled = values * _reciprocal(scale)
    # Round half away from zero (C's roundf); torch.round would round half to even.
    whole = scaled.abs().floor()
    levels = scaled.sign() * (whole + (2 * (scaled.abs() - whole)).floor())
    return torch.cat((_half_bytes(scale), levels.to(torch.int8).view(torch.uint8)), dim=1)


def _encode_q4_0(values: Tensor) -> Tensor:
    at = values.abs().argmax(dim=1, keepdim=True)
    scale = values.gather(1, at) / -8
    levels = (values * _reciprocal(scale) + 8.5).trunc()
    return torch.cat((_half_bytes(scale), _pack(levels)), dim=1)


def _encode_q4_1(values: Tensor) -> Tensor:
    low = values.amin(dim=1, keepdim=True)
    scale = (values.amax(dim=1, keepdim=True) - low) / 15
    levels = ((values - low) * _reciprocal(scale) + 0.5).trunc()
    return torch.cat((_half_bytes(scale), _half_bytes(low), _pack(levels)), dim=1)


_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"Q8_0": _decode_q8_0, "Q4_0": _decode_q4_0, "Q4_1": _decode_q4_1}
)
_ENCODERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"Q8_0": _encode_q8_0, "Q4_0": _encode_q4_0, "Q4_1": _encode_q4_1}
)
