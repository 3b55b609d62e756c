"""GGUF v2 and v3 headers, read with `struct` and checked against the file's size. No torch.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantised shapes are given
outermost first, i.e. ggml's dimensions reversed. The `gguf` library reads the same facts (the
tests compare) but takes seconds on a large vocabulary and indexes out of range on bad input.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from metainfer.core.errors import ModelError
from metainfer.formats.index import TensorInfo
from metainfer.formats.schemes import GGML_TYPES, tensor_bytes

MAX_DIMS = 8
MAX_ENTRIES = 1_000_000
MAX_NESTING = 4

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors (by the file's own names) of one GGUF file."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """``general.architecture``; `ModelError` when absent."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise _bad(self.path, "it does not state general.architecture")
        return value


def _bad(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{path.name} is not a sound GGUF file: {what}.", "Download or convert the file again."
    )


class _Cursor:
    """Bounds-checked little-endian reads."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def take(self, count: int) -> int:
        start = self.at
        if count > self.size - start:
            raise _bad(self.path, f"it ends inside its header, at byte {self.size}")
        self.at = start + count
        return start

    def scalar(self, code: str) -> Any:
        start = self.take(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def text(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        # Vocabulary entries of damaged or odd files need not be UTF-8; keep the header readable.
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(depth)
        if kind not in _SCALARS:
            raise _bad(self.path, f"metadata type {kind} at byte {self.at} is unknown")
        return self.scalar(_SCALARS[kind])

    def array(self, depth: int) -> list[Any]:
        if depth >= MAX_NESTING:
            raise _bad(self.path, "its metadata arrays are nested too deep")
        kind, count = self.scalar("I"), self.scalar("Q")
        code = _SCALARS.get(kind)
        if code is not None:
            start = self.take(count * struct.calcsize("<" + code))
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        if count * 8 > self.size - self.at:
            raise _bad(self.path, f"a metadata array claims {count} entries")
        return [self.value(kind, depth + 1) for _ in range(count)]


def read_header(path: Path) -> GgufHeader:
    """Header of `path`; every tensor is checked to lie inside the file, without overlaps."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelError(
                    f"{path.name} is not a GGUF file: it does not start with the bytes 'GGUF'.",
                    "Pass a .gguf file, or a folder in Hugging Face layout.",
                )
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(path, data))
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.", "Check the path.") from error


def _parse(cursor: _Cursor) -> GgufHeader:
    path = cursor.path
    cursor.take(4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        endian = " (it looks big-endian)" if version & 0xFFFF == 0 else ""
        raise ModelError(
            f"{path.name} is GGUF version {version}{endian}; versions 2 and 3 are read.",
            "Convert the model again with a current llama.cpp.",
        )
    tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
    if max(tensor_count, key_count) > MAX_ENTRIES:
        raise _bad(path, f"it claims {tensor_count} tensors and {key_count} keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise _bad(path, f"key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _bad(path, f"general.alignment is {alignment!r}, not a power of two")
    base = -(-cursor.at // alignment) * alignment
    tensors = _place(cursor, entries, base, alignment)
    return GgufHeader(path, version, metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
    name = cursor.text()
    dims = cursor.scalar("I")
    if dims > MAX_DIMS:
        raise _bad(cursor.path, f"tensor {name!r} has {dims} dimensions")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(dims)]))
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    if kind not in GGML_TYPES:
        raise ModelError(
            f"Tensor {name!r} in {cursor.path.name} has ggml type {kind}, which is not known.",
            "Use a file in F16, BF16, Q8_0, Q4_0 or Q4_1.",
            code="unsupported_scheme",
        )
    return name, GGML_TYPES[kind], shape, offset


def _place(
    cursor: _Cursor,
    entries: list[tuple[str, str, tuple[int, ...], int]],
    base: int,
    alignment: int,
) -> dict[str, TensorInfo]:
    path, tensors = cursor.path, {}
    for name, scheme, shape, offset in entries:
        if name in tensors:
            raise _bad(path, f"tensor {name!r} appears twice")
        if offset % alignment:
            raise _bad(path, f"tensor {name!r} is not aligned to {alignment} bytes")
        nbytes = tensor_bytes(scheme, shape)
        if base + offset + nbytes > cursor.size:
            raise _bad(
                path,
                f"tensor {name!r} ends at byte {base + offset + nbytes}, "
                f"the file has {cursor.size}",
            )
        tensors[name] = TensorInfo(name, scheme, shape, nbytes, path, base + offset)
    ordered = sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes))
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise _bad(path, f"tensors {before.name!r} and {after.name!r} overlap")
    return tensors
