"""Cache tensors: one pool per group, one view per layer. The book decides which page holds what.

A pool is made from its group alone: the form of its entries says how a page is held. Layout
``kv-pages@1``: per layer K and V, each [P, G, Hkv, D], entries of one page side by side.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.core.step import PageCopy, StateMove
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.spec import GroupKind, GroupSpec
from metainfer.kv.store.entries import EntryPages, StateRows

TYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}


@dataclass(slots=True)
class PagedLayerCache:
    """One layer's pages: `k` and `v` [P, G, Hkv, D]; `group` is the group's index. `parts`: ranks
    over which the keys of a page are dealt; G are this one's."""

    group: int
    k: Tensor
    v: Tensor
    parts: int = 1


LayerView = PagedLayerCache | EntryPages | StateRows


class Pool(Protocol):
    """The tensors of one group."""

    def view(self, row: int) -> LayerView:
        """What the `row`-th layer of the group reads and writes."""
        ...

    def copy(self, move: PageCopy) -> None:
        """Copy one page over all layers."""
        ...

    def move(self, move: StateMove) -> None:
        """Save, load or clear one slot over all layers."""
        ...

    @property
    def nbytes(self) -> int: ...


class PairPool:
    """K and V: `k` and `v` [L, P, G, Hkv, D] over the group's L layers."""

    def __init__(self, spec: GroupSpec, pages: int, device: torch.device) -> None:
        form = spec.form
        self._group, self._parts = spec.index, spec.shards
        shape = (len(spec.layers), pages, spec.rank_entries, form.heads, form.width)
        self.k = zeros(shape, TYPES[form.stored], device)
        self.v = zeros(shape, TYPES[form.stored], device)

    def view(self, row: int) -> PagedLayerCache:
        return PagedLayerCache(self._group, self.k[row], self.v[row], self._parts)

    def copy(self, move: PageCopy) -> None:
        self.k[:, move.target] = self.k[:, move.source]
        self.v[:, move.target] = self.v[:, move.source]

    def move(self, move: StateMove) -> None:
        raise InternalError(f"group {self._group} is paged, the plan moves its state")

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class EntryPool:
    """Latents or index keys: `data` [L, P, G, width], scaled forms [L, P, page bytes] uint8."""

    def __init__(self, spec: GroupSpec, pages: int, device: torch.device) -> None:
        form = spec.form
        self._spec = spec
        page = (spec.rank_entries, form.width)
        if form.stored == "uint8":
            page = (form.page_bytes(spec.rank_entries),)  # type: ignore[assignment]
        self.data = zeros((len(spec.layers), pages, *page), TYPES[form.stored], device)

    def view(self, row: int) -> EntryPages:
        spec = self._spec
        return EntryPages(spec.index, self.data[row], spec.form, spec.rank_entries, spec.shards)

    def copy(self, move: PageCopy) -> None:
        self.data[:, move.target] = self.data[:, move.source]

    def move(self, move: StateMove) -> None:
        raise InternalError(f"group {self._spec.name} is paged, the plan moves its state")

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class RowPool:
    """Slot states: `data` [L, B + 1, parts, rows, C] and `saved` [L, places, parts, kept, C].

    Line B belongs to padding. A snapshot keeps the last `snapshot_rows` rows of a ring, which is
    what a hit needs: positions are multiples of the ring there.
    """

    def __init__(self, spec: GroupSpec, slots: int, places: int, device: torch.device) -> None:
        form = spec.form
        self._spec, self._slots = spec, slots
        self._kept = spec.snapshot_rows or spec.rows
        layers, dtype = len(spec.layers), TYPES[form.stored]
        width = form.heads * form.width
        self.data = zeros((layers, slots + 1, form.parts, spec.rows, width), dtype, device)
        self.saved = zeros((layers, places, form.parts, self._kept, width), dtype, device)

    def view(self, row: int) -> StateRows:
        return StateRows(self._spec.index, self.data[row])

    def copy(self, move: PageCopy) -> None:
        raise InternalError(f"group {self._spec.name} has no pages, the plan copies one")

    def move(self, move: StateMove) -> None:
        line = self.data[:, move.slot - move.domain * self._slots]
        kept = line[..., -self._kept :, :]
        if move.kind == "save":
            self.saved[:, move.snapshot] = kept
        elif move.kind == "load":
            kept.copy_(self.saved[:, move.snapshot])
        elif move.kind == "zero":
            line.zero_()
        else:
            raise InternalError(f"state move {move.kind!r} is not known")

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.saved.nbytes


class KVStore:
    """All pools of one KV domain on one device.

    `layers[i]` maps cache names (``kv``, ``local``, ``rows`` ...) to layer i's views.
    """

    def __init__(self, sizes: CacheSizes, device: torch.device) -> None:
        self.slots = sizes.slots
        self.pools: list[Pool] = []
        by_layer: dict[int, dict[str, LayerView]] = {}
        for group in sizes.groups:
            pool = _pool(group, sizes, device)
            self.pools.append(pool)
            for row, layer in enumerate(group.layers):
                by_layer.setdefault(layer, {})[group.cache] = pool.view(row)
        self.layers: list[Mapping[str, LayerView]] = [by_layer[layer] for layer in sorted(by_layer)]

    def copy_pages(self, moves: Sequence[PageCopy]) -> None:
        for move in moves:
            self.pools[move.group].copy(move)

    def move_states(self, moves: Sequence[StateMove]) -> None:
        for move in moves:
            self.pools[move.group].move(move)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)


def _pool(group: GroupSpec, sizes: CacheSizes, device: torch.device) -> Pool:
    if group.kind is GroupKind.STATE:
        return RowPool(group, sizes.slots, sizes.places(group.index), device)
    if group.form.parts == 2:
        return PairPool(group, sizes.pages[group.index], device)
    return EntryPool(group, sizes.pages[group.index], device)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the host as untouched memory, so that unused cache costs nothing.

    Huge pages where the system grants them: first use of a small page costs about 10 µs, which is
    150 ms for a prompt of 1,000 tokens of a 135M model.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))
