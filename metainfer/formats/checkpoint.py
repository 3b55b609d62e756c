"""Tensors of a checkpoint by Hugging Face name, read through memory maps.

Rows that llama.cpp interleaved for its rotary layout are put back here, on the stored blocks:
moving whole rows is exact for every scheme. Nothing is copied but those rows and tensors whose
bytes are not aligned to their dtype.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from metainfer.core.errors import ModelError
from metainfer.formats.block_codecs import check_scales, from_stored
from metainfer.formats.checks import StoredWeight
from metainfer.formats.gguf_names import permuted_heads
from metainfer.formats.index import CheckpointIndex, TensorInfo
from metainfer.formats.quant import TORCH_DTYPES, RawTensor, Stored
from metainfer.formats.readahead import ReadAhead
from metainfer.formats.schemes import bytes_per_row, is_quantised

#: Called after each tensor with (bytes read so far, bytes in all).
Progress = Callable[[int, int], None]


class Checkpoint:
    """An open checkpoint. Returned tensors are private copy-on-write views of the files."""

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the headers of a folder, ``.safetensors`` or ``.gguf`` file."""
        return cls(CheckpointIndex.open(path))

    def read(self, name: str) -> RawTensor:
        """Tensor `name`; `ModelError` when absent or not representable."""
        return self._read(self.index[name])

    def iter_tensors(
        self, names: Iterable[str] | None = None, progress: Progress | None = None
    ) -> Iterator[tuple[str, RawTensor]]:
        """The named tensors (all by default), each once, in file order.

        Memory is bounded by what the caller keeps: a file's map is let go once its last tensor
        has been handed out.
        """
        wanted = self.index.tensors if names is None else dict.fromkeys(names)
        named = [(name, self.index[name]) for name in wanted]
        named.sort(key=lambda pair: (pair[1].file, pair[1].offset))
        total = sum(info.nbytes for _, info in named)
        done = 0
        for position, (name, info) in enumerate(named):
            yield name, self._read(info)
            done += info.nbytes
            if progress is not None:
                progress(done, total)
            if position + 1 == len(named) or named[position + 1][1].file != info.file:
                self._maps.pop(info.file, None)

    def close(self) -> None:
        """Let go of the maps; tensors already handed out stay valid."""
        self._maps.clear()

    def release(self, info: TensorInfo) -> None:
        """Unmap the pages that lie within a tensor: clean, they come back from the file."""
        mapped = self._maps.get(info.file)
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if mapped is not None and last > first and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _read(self, info: TensorInfo) -> RawTensor:
        if is_quantised(info.scheme):
            width = bytes_per_row(info.scheme, info.shape[-1])
            data = self._bytes(info, torch.uint8).reshape(prod(info.shape[:-1]), width)
        elif info.scheme in TORCH_DTYPES:
            data = self._bytes(info, TORCH_DTYPES[info.scheme]).reshape(info.shape)
        else:
            raise ModelError(
                f"Tensor {info.name!r} has scheme {info.scheme}, which cannot be loaded.",
                "Use a checkpoint in BF16, F16, F32, F8_E4M3 or a supported GGUF scheme.",
                code="unsupported_scheme",
            )
        if self.index.container == "gguf":
            heads = permuted_heads(info.name, self.index.metadata)
            if heads:
                data = unpermute_rows(data, heads, info.name)
        return RawTensor(info.scheme, info.shape, data)

    def _bytes(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        """The tensor's bytes as a flat tensor of `dtype`."""
        if info.nbytes == 0:
            return torch.empty(0, dtype=dtype)
        mapped = self._map(info.file)
        if info.offset + info.nbytes > len(mapped):
            raise ModelError(
                f"{info.file} became shorter while it was in use.",
                "Do not change a model's files while they are loaded; start again.",
                code="file_changed",
            )
        if info.offset % dtype.itemsize:
            flat = torch.frombuffer(
                mapped, dtype=torch.uint8, count=info.nbytes, offset=info.offset
            )
            return flat.clone().view(dtype)
        return torch.frombuffer(
            mapped, dtype=dtype, count=info.nbytes // dtype.itemsize, offset=info.offset
        )

    def _map(self, path: Path) -> mmap.mmap:
        found = self._maps.get(path)
        if found is None:
            try:
                with path.open("rb") as stream:
                    # Copy-on-write: torch wants writable memory, the file stays untouched.
                    found = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise ModelError(f"Cannot read {path}: {error}.", "Check the file.") from error
            self._maps[path] = found
        return found


class BlockCheckpoint:
    """A checkpoint whose block-scaled matrices come whole: elements, scales, second scale.

    `blocks` by the name of the weight; every other name is a dense tensor of `index`. A reader that
    knows what comes next says so (`expect`) and lets go of what it has copied (`release`).
    """

    def __init__(self, index: CheckpointIndex, blocks: Mapping[str, StoredWeight]) -> None:
        self._checkpoint = Checkpoint(index)
        self._blocks = blocks
        self._ahead = ReadAhead()

    def read(self, name: str) -> Stored:
        """Tensor `name`, over the mapped file; `ModelError` when absent, or a scale is insane."""
        stored = self._blocks.get(name)
        read = self._checkpoint.read
        if stored is None:
            return read(name)
        second = read(stored.second).data if stored.second else None
        tensor = from_stored(stored.format, read(stored.data).data, read(stored.scale).data, second)
        check_scales(tensor, name)
        return tensor

    def expect(self, names: Iterable[str], part: int = 0, parts: int = 1) -> None:
        """Tensors that will be read next (part `part` of `parts` of their rows): a hint."""
        spans = []
        for info in self._infos(names):
            start, stop = (info.nbytes * at // parts for at in (part, part + 1))
            spans.append((info.file, info.offset + start, info.offset + stop))
        self._ahead.want(spans)

    def release(self, names: Iterable[str]) -> None:
        """Let the memory of tensors go that have been copied; they can be read again."""
        for info in self._infos(names):
            self._checkpoint.release(info)

    def close(self) -> None:
        """Let go of the files; tensors already handed out stay valid."""
        self._ahead.close()
        self._checkpoint.close()

    def _infos(self, names: Iterable[str]) -> Iterator[TensorInfo]:
        for name in names:
            stored = self._blocks.get(name)
            for part in (stored.data, stored.scale) if stored else (name,):
                if part in self._checkpoint.index.tensors:
                    yield self._checkpoint.index[part]


def unpermute_rows(data: Tensor, heads: int, name: str = "tensor") -> Tensor:
    """Undo llama.cpp's row order for rotary attention: per head, (D/2, 2) back to (2, D/2).

    `data` is ``[N, ...]`` with N = heads * D; source: `LlamaModel.permute` in llama.cpp's
    `convert_hf_to_gguf.py`.
    """
    rows = data.shape[0]
    if rows % (2 * heads):
        raise ModelError(
            f"Tensor {name!r} has {rows} rows, which {heads} heads of even width cannot share.",
            "The GGUF file's head counts do not fit its tensors; convert it again.",
            code="bad_shape",
        )
    grouped = data.reshape(heads, rows // heads // 2, 2, *data.shape[1:])
    return grouped.transpose(1, 2).reshape(data.shape)
