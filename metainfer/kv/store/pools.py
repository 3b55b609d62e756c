"""Cache tensors: one pool per group, one view per layer. The book decides which page holds what.

Layout ``kv-pages@1``: per layer K and V, each [P, G, Hkv, D], entries of one page side by side.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from metainfer.core.errors import InternalError
from metainfer.core.step import PageCopy
from metainfer.kv.book.spec import GroupKind, GroupSpec

PAGES = "kv-pages@1"


@dataclass(slots=True)
class PagedLayerCache:
    """One layer's pages: `k` and `v` [P, G, Hkv, D]; `group` is the group's index."""

    group: int
    k: torch.Tensor
    v: torch.Tensor


@dataclass(slots=True)
class PagePool:
    """The pages of one group: `k` and `v` [L, P, G, Hkv, D] over its L layers."""

    spec: GroupSpec
    k: torch.Tensor
    v: torch.Tensor

    def copy(self, moves: Sequence[PageCopy]) -> None:
        """Copy whole pages, in order, over all layers."""
        for move in moves:
            self.k[:, move.target] = self.k[:, move.source]
            self.v[:, move.target] = self.v[:, move.source]


class KVStore:
    """All pools of one KV domain on one device."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pages: Sequence[int],
        *,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pools: list[PagePool] = []
        by_layer: dict[int, PagedLayerCache] = {}
        for group, count in zip(groups, pages, strict=True):
            if group.kind is GroupKind.STATE or group.layout != PAGES:
                raise InternalError(f"group {group.name} of layout {group.layout} has no pool")
            shape = (len(group.layers), count, group.page_entries, kv_heads, head_dim)
            pool = PagePool(
                group,
                _zeros(shape, dtype, device),
                _zeros(shape, dtype, device),
            )
            self.pools.append(pool)
            for row, layer in enumerate(group.layers):
                by_layer[layer] = PagedLayerCache(group.index, pool.k[row], pool.v[row])
        self.layers = [by_layer[layer] for layer in sorted(by_layer)]

    def copy_pages(self, moves: Sequence[PageCopy]) -> None:
        for move in moves:
            self.pools[move.group].copy((move,))

    @property
    def nbytes(self) -> int:
        return sum(pool.k.nbytes + pool.v.nbytes for pool in self.pools)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the host as untouched memory, so that unused cache costs nothing.

    Huge pages where the system grants them: first use of a small page costs about 10 µs, which is
    150 ms for a prompt of 1,000 tokens of a 135M model.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))
