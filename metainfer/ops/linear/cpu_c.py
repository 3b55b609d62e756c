"""Linear layers on CPU with the weights left in GGUF's Q4_0, Q4_1 or Q8_0 blocks (compiled C).

Claims:

* The weights used are bit for bit the float32 values that GGUF defines; arithmetic is float32.
* One output is summed in an order that depends on K alone: a row of ``linear(x)`` is the same
  bits for any number of rows in ``x`` and any number of threads (on one machine).
* Weights are read once per call, 5 bits (Q4_1), 4.5 (Q4_0) or 8.5 (Q8_0) per element; `embed`
  reads rows from the same packing, so a tied embedding is held once.

Needs a C compiler; K a multiple of 32; contiguous columns. The packing and the summation order
are described in ``cpu_rows.c``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from metainfer.core.errors import InternalError, ModelError
from metainfer.core.verdict import Verdict
from metainfer.kernels import native

SOURCE = Path(__file__).with_name("cpu_rows.c")
LAYOUT = "c-rows16@1"
TILE = 16
BLOCK = 32

# scheme -> (number in the C file, bytes of a block in the checkpoint, bytes of a row in a tile)
SCHEMES = {"q4_0": (0, 18), "q4_1": (1, 20), "q8_0": (2, 34)}


class _Segment(ctypes.Structure):
    _fields_ = [
        ("scheme", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """A weight [N, K], perhaps of several matrices stacked along N, in tiles of 16 rows.

    `tensors` hold the tiles (uint8), one per run of rows of one scheme; `segments` is the C view
    of them and keeps no reference itself. `defines` choose the library (tests only).
    """

    n: int
    k: int
    schemes: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None  # float32 [N]
    segments: ctypes.Array[_Segment]
    defines: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of weight memory, bias included."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return bias + sum(tensor.nbytes for tensor in self.tensors)


def probe() -> Verdict:
    """Whether the C library can be built and loaded here. Never raises."""
    return native.try_load(SOURCE)[1]


@functools.cache
def _functions(defines: tuple[str, ...]) -> tuple[Callable[..., int], ...]:
    library = native.load(SOURCE, defines=defines)
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    linear_c, pack_c, embed_c = library.mi_linear, library.mi_pack, library.mi_embed
    linear_c.argtypes = [
        *(pointer, long, long, long),
        *(pointer, long, pointer, pointer, long, integer),
    ]
    linear_c.restype = integer
    pack_c.argtypes = [pointer, long, long, integer, pointer]
    pack_c.restype = None
    embed_c.argtypes = [pointer, long, long, pointer, pointer, integer]
    embed_c.restype = None
    return linear_c, pack_c, embed_c


def _check_part(scheme: str, raw: torch.Tensor, k: int) -> None:
    if scheme not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise ModelError(f"Scheme {scheme} has no C kernel.", f"Use one of {known}.")
    want = k // BLOCK * SCHEMES[scheme][1]
    if raw.dtype != torch.uint8 or raw.dim() != 2 or raw.shape[1] != want:
        raise ModelError(
            f"A {scheme} weight with K={k} has rows of {want} bytes (uint8), "
            f"got {raw.dtype} {list(raw.shape)}."
        )


def _scales(scheme: str, raw: torch.Tensor) -> torch.Tensor:
    """The float16 scales (and minima) of a raw weight, [N, blocks, 1 or 2]."""
    block = SCHEMES[scheme][1]
    head = 4 if scheme == "q4_1" else 2
    blocks = raw.view(raw.shape[0], -1, block)[:, :, :head].contiguous()
    return blocks.view(torch.float16)


def pack(
    parts: Sequence[tuple[str, torch.Tensor]],
    k: int,
    bias: torch.Tensor | None = None,
    *,
    defines: tuple[str, ...] = (),
) -> PackedRows:
    """Repack rows of a GGUF file; `parts` are stacked along N in the order given.

    Each part is (scheme, raw uint8 [n, bytes of a row]); schemes are ``q4_0``, ``q4_1``,
    ``q8_0`` and may differ between parts. `bias`: [N] or None. Raises `ModelError` for another
    scheme, for K not a multiple of 32, and for scales that are not finite.
    """
    if k <= 0 or k % BLOCK:
        raise ModelError(f"Block-quantised weights need K in multiples of {BLOCK}, got {k}.")
    runs: list[tuple[str, list[torch.Tensor]]] = []
    for scheme, raw in parts:
        _check_part(scheme, raw, k)
        if not torch.isfinite(_scales(scheme, raw)).all():
            raise ModelError(f"A {scheme} weight has scales that are not finite.")
        if runs and runs[-1][0] == scheme:
            runs[-1][1].append(raw)
        else:
            runs.append((scheme, [raw]))
    pack_c = _functions(defines)[1]
    segments = (_Segment * len(runs))()
    tensors: list[torch.Tensor] = []
    first = 0
    for segment, (scheme, raws) in zip(segments, runs, strict=True):
        rows = sum(raw.shape[0] for raw in raws)
        tiles = -(-rows // TILE)
        number, block = SCHEMES[scheme]
        packed = _aligned(tiles * TILE * (k // BLOCK) * block)
        raw = raws[0].contiguous() if len(raws) == 1 else torch.cat(raws)
        pack_c(raw.data_ptr(), rows, k, number, packed.data_ptr())
        segment.scheme, segment.tiles, segment.rows, segment.first = number, tiles, rows, first
        segment.data = packed.data_ptr()
        tensors.append(packed)
        first += rows
    if bias is not None:
        if bias.shape != (first,):
            raise ModelError(f"The bias has shape {list(bias.shape)}, the weight {first} rows.")
        bias = bias.float().contiguous()
    schemes = tuple(scheme for scheme, _ in runs)
    return PackedRows(first, k, schemes, tuple(tensors), bias, segments, defines)


def _aligned(size: int) -> torch.Tensor:
    """uint8 [size] that starts at a multiple of 64 bytes."""
    room = torch.empty(size + 63, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return room[start : start + size]


def linear(
    x: torch.Tensor, packed: PackedRows, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ W.T + bias``: x float32 [T, K] -> float32 [T, N].

    `x` may have any row stride if its columns are contiguous; other inputs are copied. `out`, if
    given, is float32 [T, N] with contiguous columns and does not overlap `x`.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != packed.k:
        raise InternalError(f"linear wants float32 [T, {packed.k}], got {x.dtype} {list(x.shape)}")
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    if out is None:
        out = torch.empty((rows, packed.n))
    elif out.dtype != torch.float32 or out.shape != (rows, packed.n) or out.stride(1) != 1:
        raise InternalError(f"linear cannot write to {out.dtype} {list(out.shape)}")
    if rows == 0:
        return out
    failed = _functions(packed.defines)[0](
        x.data_ptr(),
        rows,
        x.stride(0),
        packed.k,
        packed.segments,
        len(packed.segments),
        None if packed.bias is None else packed.bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the scratch of a linear layer")
    return out


def embed(ids: torch.Tensor, packed: PackedRows) -> torch.Tensor:
    """Rows `ids` of a packed weight of one scheme: int64 [T] -> float32 [T, K], exact.

    An id outside [0, N) raises `InternalError` (the tokenizer and the model disagree).
    """
    if len(packed.schemes) != 1:
        raise InternalError("embed reads a weight of one scheme")
    ids = ids.to(torch.int64).contiguous()
    out = torch.empty((ids.numel(), packed.k))
    if ids.numel() == 0:
        return out
    low, high = torch.aminmax(ids)
    if int(low) < 0 or int(high) >= packed.n:
        raise InternalError(f"token id outside [0, {packed.n})")
    embed_c = _functions(packed.defines)[2]
    threads = torch.get_num_threads()
    embed_c(
        ids.data_ptr(), ids.numel(), packed.k, packed.segments, out.data_ptr(), threads
    )
    return out
