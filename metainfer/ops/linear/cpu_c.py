"""Linear layers on CPU with the weights left in GGUF's Q4_0, Q4_1 or Q8_0 blocks (compiled C).

Claims:

* The weights used are bit for bit the float32 values that GGUF defines; arithmetic is float32.
* One output is summed in an order that depends on K alone: a row of ``linear(x)`` is the same
  bits for any number of rows in ``x`` and any number of threads (on one machine).
* Weights are read once per call, 5 bits (Q4_1), 4.5 (Q4_0) or 8.5 (Q8_0) per element; `embed`
  reads rows from the same packing, so a tied embedding is held once.

Needs a C compiler; K a multiple of 32; float32 on CPU. The packing and the summation order are
described in ``cpu_rows.c``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from metainfer.core.errors import InternalError, ModelError
from metainfer.core.verdict import Verdict
from metainfer.formats.quant import RawTensor
from metainfer.formats.schemes import BLOCKS
from metainfer.kernels import native
from metainfer.ops.linear.packed import PackedWeight, joint_shape

SOURCE = Path(__file__).with_name("cpu_rows.c")
LAYOUT = "c-rows16@1"
SCHEMES = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}  # numbers as in the C file
TILE = 16  # rows
BLOCK = 32  # columns


class _Segment(ctypes.Structure):
    """The C file's `segment`: a run of rows of one scheme."""

    _fields_ = [
        ("scheme", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """What the C functions read. The segments point into the tensors of `PackedWeight.data`."""

    linear: Callable[..., int]
    embed: Callable[..., None]
    segments: ctypes.Array[_Segment]
    count: int
    bias: int | None


def probe() -> Verdict:
    """Whether the C library can be built and loaded here. Never raises."""
    return native.try_load(SOURCE)[1]


@functools.cache
def _functions(
    defines: tuple[str, ...],
) -> tuple[Callable[..., int], Callable[..., None], Callable[..., None]]:
    library = native.load(SOURCE, defines=defines)
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    linear_c, embed_c, pack_c = library.mi_linear, library.mi_embed, library.mi_pack
    linear_c.argtypes = [
        *(pointer, long, long, long),  # x, T, ldx, K
        *(pointer, long, pointer, pointer, long, integer),  # segments, count, bias, y, ldy, threads
    ]
    linear_c.restype = integer
    embed_c.argtypes = [pointer, long, long, pointer, pointer, integer]
    embed_c.restype = None
    pack_c.argtypes = [pointer, long, long, integer, pointer]
    pack_c.restype = None
    return linear_c, embed_c, pack_c


def _check_scales(raw: RawTensor) -> None:
    """Scales that are not finite would poison whole rows silently."""
    head = 4 if raw.scheme == "Q4_1" else 2
    blocks = raw.data.reshape(raw.data.shape[0], -1, BLOCKS[raw.scheme][1])
    scales = blocks[:, :, :head].contiguous().view(torch.float16)
    if not bool(torch.isfinite(scales).all()):
        raise ModelError(
            f"A {raw.scheme} weight {list(raw.shape)} has scales that are not finite.",
            "The checkpoint is damaged.",
            code="bad_weight",
        )


def pack(
    raws: Sequence[RawTensor],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    site: str = "",
    defines: tuple[str, ...] = (),
) -> PackedWeight:
    """``c-rows16@1``: `raws` laid end to end along N; their schemes may differ.

    `defines` select another build of the C file (tests).

    Raises:
        ModelError: K is not a multiple of 32, the widths differ, or scales are not finite.
        InternalError: a scheme, dtype or device that the layout's conditions exclude.
    """
    n, k = joint_shape(raws)
    if dtype != torch.float32 or torch.device(device).type != "cpu":
        raise InternalError(f"{LAYOUT} serves float32 on cpu, not {dtype} on {device}")
    runs: list[list[RawTensor]] = []
    for raw in raws:
        if raw.scheme not in SCHEMES:
            raise InternalError(f"{LAYOUT} does not hold {raw.scheme}")
        _check_scales(raw)
        if runs and runs[-1][0].scheme == raw.scheme:
            runs[-1].append(raw)
        else:
            runs.append([raw])
    linear_c, embed_c, pack_c = _functions(defines)
    segments = (_Segment * len(runs))()
    data: dict[str, Tensor] = {}
    first = 0
    for index, run in enumerate(runs):
        scheme = run[0].scheme
        rows = sum(raw.shape[0] for raw in run)
        tiles = -(-rows // TILE)
        tensor = _aligned(tiles * TILE * (k // BLOCK) * BLOCKS[scheme][1])
        source = torch.cat([raw.data for raw in run]).contiguous()
        pack_c(source.data_ptr(), rows, k, SCHEMES[scheme], tensor.data_ptr())
        segments[index] = _Segment(SCHEMES[scheme], tiles, rows, first, tensor.data_ptr())
        data[f"tiles{index}.{scheme}"] = tensor
        first += rows
    if bias is not None:
        if bias.shape != (n,):
            raise ModelError(f"A bias has shape {list(bias.shape)}, its weight {n} rows.")
        bias = bias.to(torch.float32).contiguous()
    address = None if bias is None else bias.data_ptr()
    handle = _Handle(linear_c, embed_c, segments, len(runs), address)
    return PackedWeight(LAYOUT, (n, k), data, bias, site, handle)


def _aligned(size: int) -> Tensor:
    """uint8 [size] that starts at a multiple of 64 bytes."""
    room = torch.empty(size + 63, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return room[start : start + size]


def _handle(weight: PackedWeight) -> _Handle:
    handle = weight.handle
    if not isinstance(handle, _Handle):
        raise InternalError(f"a weight in layout {weight.layout} reached the kernel of {LAYOUT}")
    return handle


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ Wᵀ + bias``: x float32 [T, K], any row stride -> float32 [T, N]."""
    handle = _handle(weight)
    n, k = weight.shape
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != k:
        raise InternalError(f"linear wants float32 [T, {k}], got {x.dtype} {list(x.shape)}")
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty((rows, n))  # [T, N]
    if rows == 0:
        return out
    failed = handle.linear(
        x.data_ptr(),
        rows,
        x.stride(0),
        k,
        handle.segments,
        handle.count,
        handle.bias,
        out.data_ptr(),
        n,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the scratch of a linear layer")
    return out


def embed(ids: Tensor, table: PackedWeight) -> Tensor:
    """``out[t] = W[ids[t]]``, exact: ids int64 [T], W of one scheme -> float32 [T, K].

    Raises `InternalError` for an id outside [0, N).
    """
    handle = _handle(table)
    n, k = table.shape
    if handle.count != 1 or ids.dtype != torch.int64:
        raise InternalError("embed reads int64 ids and a table of one scheme")
    ids = ids.contiguous()
    out = torch.empty((ids.numel(), k))  # [T, K]
    if ids.numel() == 0:
        return out
    low, high = ids.aminmax()
    if int(low) < 0 or int(high) >= n:
        raise InternalError(f"a token id outside [0, {n})")
    threads = torch.get_num_threads()
    handle.embed(ids.data_ptr(), ids.numel(), k, handle.segments, out.data_ptr(), threads)
    return out
