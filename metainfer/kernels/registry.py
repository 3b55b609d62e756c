"""Declared implementations and layouts as one value.

Tests and the planner build their own (with kernels removed, or a vendor's added);
`metainfer.ops.catalog` builds the one that ships.
"""

from __future__ import annotations

from collections.abc import Iterable

from metainfer.core.errors import InternalError
from metainfer.kernels.impl import Impl, Layout


class Registry:
    """Implementations by op in declared order, layouts by id."""

    def __init__(self, impls: Iterable[Impl] = (), layouts: Iterable[Layout] = ()) -> None:
        self._impls: dict[str, list[Impl]] = {}
        self._layouts: dict[str, Layout] = {}
        for layout in layouts:
            self.add_layout(layout)
        for impl in impls:
            self.add(impl)

    def add(self, impl: Impl) -> None:
        """Append a candidate; two of one id is a bug."""
        listed = self._impls.setdefault(impl.op, [])
        if any(other.name == impl.name for other in listed):
            raise InternalError(f"implementation {impl.id} is declared twice")
        listed.append(impl)

    def add_layout(self, layout: Layout) -> None:
        if layout.id in self._layouts:
            raise InternalError(f"layout {layout.id} is declared twice")
        self._layouts[layout.id] = layout

    def of(self, op: str) -> tuple[Impl, ...]:
        return tuple(self._impls.get(op, ()))

    def ops(self) -> tuple[str, ...]:
        return tuple(self._impls)

    def impls(self) -> tuple[Impl, ...]:
        return tuple(impl for listed in self._impls.values() for impl in listed)

    def layout(self, layout_id: str) -> Layout:
        return self._layouts[layout_id]

    def layouts(self, role: str) -> tuple[Layout, ...]:
        return tuple(layout for layout in self._layouts.values() if layout.role == role)

    def readers(self, role: str) -> frozenset[str]:
        """Ops with an implementation that needs a layout of `role`."""
        return frozenset(
            op
            for op, listed in self._impls.items()
            if any(role in impl.requires_layout for impl in listed)
        )

    def without(self, *ids: str) -> Registry:
        """A copy with some implementations removed: what if this kernel were missing?"""
        kept = [impl for impl in self.impls() if impl.id not in ids]
        return Registry(kept, self._layouts.values())
