"""Safetensors files written as tensors come: one shard's header first, then each at its place.

Memory is one tensor. Bytes depend on the entries alone, not on the order in which they are put:
shards are filled in the entries' order, inside a shard wider dtypes come first (so that every
tensor is aligned), and headers are padded to 8 bytes as the format asks. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from metainfer.core.errors import InternalError, UserError
from metainfer.formats.safetensors_header import INDEX_NAME, SINGLE_NAME
from metainfer.formats.schemes import DENSE_BITS, tensor_bytes

#: Bytes of tensor data in a shard, unless one tensor is larger.
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written: a name, a safetensors dtype, a shape."""

    name: str
    scheme: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.scheme, self.shape)


def plan_shards(
    entries: Sequence[Entry], limit: int = SHARD_BYTES
) -> list[tuple[str, list[Entry]]]:
    """(file name, its entries in their order) for shards of at most `limit` bytes of data."""
    groups: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not groups or size + entry.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    if len(groups) <= 1:
        return [(SINGLE_NAME, group) for group in groups]
    count = len(groups)
    return [
        (f"model-{number:05d}-of-{count:05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


class _Shard:
    """One file under its temporary name until each of its tensors is there."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.missing = {entry.name for entry in entries}
        self.places: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
        position = 0
        for entry in sorted(entries, key=lambda e: -DENSE_BITS[e.scheme]):
            self.places[entry.name] = position
            end = position + entry.nbytes
            header[entry.name] = {
                "dtype": entry.scheme, "shape": list(entry.shape), "data_offsets": [position, end],
            }  # fmt: skip
            position = end
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        self.header = raw + b" " * (-len(raw) % 8)
        self.head = len(self.header).to_bytes(8, "little") + self.header
        self.nbytes = len(self.head) + position
        self.stream: BinaryIO | None = None

    def adopt(self) -> None:
        """Take the finished file of an earlier run for this shard; `UserError` if it is not it."""
        with self.path.open("rb") as stream:
            same = stream.read(len(self.head)) == self.head
        if not same or self.path.stat().st_size != self.nbytes:
            raise UserError(
                f"{self.path} belongs to another model, seed or run.",
                "Name a new folder, or remove that file.",
                code="other_checkpoint",
            )
        self.missing.clear()

    def put(self, name: str, data: memoryview) -> None:
        if self.stream is None:
            self.stream = self.part.open("wb")
            self.stream.write(self.head)
        self.stream.seek(len(self.head) + self.places[name])
        self.stream.write(data)
        self.missing.discard(name)
        if not self.missing:
            self.stream.flush()
            os.fsync(self.stream.fileno())  # the name says finished: after a power cut, too
            self.stream.close()
            self.stream = None
            self.part.replace(self.path)


class Writer:
    """Writes `entries` into `folder` (new or empty); use it as a context.

    Leaving the context without an error writes the shard index; with one, unfinished files are
    removed. `UserError` when the folder holds anything already. `resume`: the folder may hold
    finished shards of the same entries and metadata, which `done` then names, unfinished ones,
    which are begun again, and the files called `beside`.
    """

    def __init__(
        self,
        folder: Path,
        entries: Sequence[Entry],
        *,
        shard_bytes: int = SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
        resume: bool = False,
        beside: Sequence[str] = (),
    ) -> None:
        names = [entry.name for entry in entries]
        if len(set(names)) != len(names):
            raise InternalError("a tensor is to be written twice.")
        self.folder = folder
        self._entries = {entry.name: entry for entry in entries}
        self._shards: dict[str, _Shard] = {}
        self._all: list[_Shard] = []
        for file, group in plan_shards(entries, shard_bytes):
            shard = _Shard(folder / file, group, metadata or {"format": "pt"})
            self._all.append(shard)
            self._shards |= {entry.name: shard for entry in group}
        self._claim(resume, {INDEX_NAME, *beside})
        self.done = frozenset(n for n, shard in self._shards.items() if n not in shard.missing)

    def _claim(self, resume: bool, beside: set[str]) -> None:
        """Make the folder ours, with what may stay of an earlier run."""
        folder = self.folder
        present = sorted(folder.iterdir()) if folder.is_dir() else []
        ours = {path for shard in self._all for path in (shard.path, shard.part)}
        strange = [path for path in present if path not in ours and path.name not in beside]
        if (folder.exists() and not folder.is_dir()) or strange or (present and not resume):
            raise UserError(
                f"{folder} is not an empty folder.", "Name a new one.", code="not_empty"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for shard in self._all:
            if shard.path in present:
                shard.adopt()
        for shard in self._all:
            shard.part.unlink(missing_ok=True)

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write tensor `name`, once; `data` has exactly the entry's bytes."""
        shard, entry = self._shards[name], self._entries[name]
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if view.nbytes != entry.nbytes or name not in shard.missing:
            raise InternalError(f"{name}: {view.nbytes} bytes given for {entry}, or given twice.")
        shard.put(name, view)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        missing = sorted(name for shard in self._all for name in shard.missing)
        if error is not None or missing:
            for shard in self._all:
                if shard.stream is not None:
                    shard.stream.close()
                shard.part.unlink(missing_ok=True)
            if error is None:
                raise InternalError(f"{len(missing)} tensors were not written: {missing[:5]}.")
            return
        if len(self._all) > 1:
            total = sum(entry.nbytes for entry in self._entries.values())
            places = {name: self._shards[name].path.name for name in sorted(self._entries)}
            body = {"metadata": {"total_size": total}, "weight_map": places}
            (self.folder / INDEX_NAME).write_text(json.dumps(body, indent=2) + "\n")
