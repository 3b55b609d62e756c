"""A random model written as a checkpoint in its publisher's naming, for us and for other engines.

The same reference gives the same bytes on every machine of one torch version. Memory: a few
tensors. Finished shards survive an interruption; the same call goes on after them. ``config.json``
comes last: a folder without it is not taken for a model.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metainfer.core.errors import UserError
from metainfer.formats.block_codecs import BlockTensor
from metainfer.formats.quant import Stored
from metainfer.formats.random_source import RandomSource
from metainfer.formats.safetensors_writer import SHARD_BYTES, Entry, Writer

CONFIG = "config.json"
WORKERS = 2
"""Tensors drawn at a time; twice as many are held."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """`tensors` and `nbytes` of the whole checkpoint, `kept` bytes of it from an earlier run."""

    tensors: int
    nbytes: int
    kept: int


def export(
    reference: str,
    config: Mapping[str, Any],
    source: RandomSource,
    target: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Exported:
    """Write the tensors of `source` and `config` to `target`.

    `reference` (with its seed) stands in every shard's metadata: a folder begun for another one
    is refused. `progress`: of (bytes done, bytes in all).

    Raises:
        UserError: the folder holds something else, or the disk is too small.
    """
    parts = {name: drawn.entries(name) for name, drawn in source.draws.items()}
    entries = [entry for group in parts.values() for entry in group]
    total = sum(entry.nbytes for entry in entries)
    writer = Writer(
        target,
        entries,
        shard_bytes=shard_bytes,
        metadata={"format": "pt", "metainfer.source": reference},
        resume=True,
        beside=(CONFIG,),
    )
    with writer:
        todo = [name for name, group in parts.items() if not _is_done(group, writer.done)]
        kept = sum(entry.nbytes for entry in entries if entry.name in writer.done)
        _check_disk(target, total - kept)
        done = kept
        for name, tensor in _read_ahead(source, todo):
            for entry, data in zip(parts[name], _stored(tensor), strict=True):
                if entry.name not in writer.done:
                    writer.put(entry.name, data)
                    done += entry.nbytes
            if progress is not None:
                progress(done, total)
    text = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
    (target / CONFIG).write_text(text, encoding="utf-8")
    return Exported(len(entries), total, kept)


def _is_done(group: Sequence[Entry], done: frozenset[str]) -> bool:
    return all(entry.name in done for entry in group)


def _check_disk(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed > free:
        raise UserError(
            f"{target} needs {needed / 1e9:.1f} GB more, its disk has {free / 1e9:.1f} GB.",
            "Choose another disk, or fewer layers (random:...?layers=N).",
            code="disk_full",
        )


def _read_ahead(source: RandomSource, names: Sequence[str]) -> Iterator[tuple[str, Stored]]:
    """Tensors in the order of `names`, drawn by a few threads ahead of their use."""
    waiting: deque[tuple[str, Future[Stored]]] = deque()
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="draw") as pool:
        try:
            for name in names:
                waiting.append((name, pool.submit(source.read, name)))
                if len(waiting) >= 2 * WORKERS:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _stored(tensor: Stored) -> list[memoryview]:
    """The bytes of each stored part, elements before scales."""
    if isinstance(tensor, BlockTensor):
        return [_bytes(tensor.data), _bytes(tensor.scale)]
    return [_bytes(tensor.data)]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
