"""Which adapter each row of a segment has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NONE = -1
"""The index of a row without an adapter."""

Rows = Tensor | slice
"""Rows of one adapter: rising numbers [t] int64, or a slice where they follow each other."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """`index` [T] int64 on the device, -1 where a row has none. `groups`: the same as (adapter,
    its rows), tensors on the device; None where only the device knows (a captured step)."""

    index: Tensor
    groups: tuple[tuple[int, Rows], ...] | None = None

    def by_adapter(self) -> tuple[tuple[int, Rows], ...]:
        """`groups`; waits for the device where they are not known."""
        if self.groups is not None:
            return self.groups
        found = groups_of(self.index.cpu())
        return tuple(
            (adapter, rows if isinstance(rows, slice) else rows.to(self.index.device))
            for adapter, rows in found
        )


def groups_of(index: Tensor) -> tuple[tuple[int, Rows], ...]:
    """(adapter, its rows) of an `index` [T] on the host, by rising adapter."""
    found: list[tuple[int, Rows]] = []
    for adapter in torch.unique(index).tolist():
        if adapter == NONE:
            continue
        rows = (index == adapter).nonzero().squeeze(1)
        first, last = int(rows[0]), int(rows[-1])
        together = last - first + 1 == len(rows)
        found.append((adapter, slice(first, last + 1) if together else rows))
    return tuple(found)
