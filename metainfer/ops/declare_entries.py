"""Declarations of ops that read or write cache entries through `kv.store.entries`. No torch.

Such an implementation serves every form; a bundle has one, so it is declared once per layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from metainfer.kernels.cost import BYTES, extent, width
from metainfer.kernels.impl import Context, Impl
from metainfer.kv.book.form import entry_form
from metainfer.ops.declare import portable, reference

#: Layout id -> what it adds to an implementation's name.
LATENTS: Mapping[str, str] = MappingProxyType({"latent@1": "", "latent-fp8@1": "-fp8"})
KEYS: Mapping[str, str] = MappingProxyType(
    {"index@1": "", "index-fp8@1": "-fp8", "index-fp4@1": "-fp4"}
)

PLAIN = ("latent@1", "index@1")

Cost = Callable[[str], Callable[[Context], float | None]]
"""Makes an implementation's cost function from the id of the layout that it reads."""


def per_layout(role: str, layouts: Mapping[str, str], cost: Cost, impl: Impl) -> tuple[Impl, ...]:
    """`impl` once per layout of `role`; `cost` makes its cost function from the layout's id."""
    return tuple(
        replace(
            impl,
            name=impl.name + suffix,
            requires_layout={**impl.requires_layout, role: layout},
            cost=cost(layout),
        )
        for layout, suffix in layouts.items()
    )


def torch_and_reference(
    op: str,
    role: str,
    layouts: Mapping[str, str],
    loads: tuple[str, str],
    costs: tuple[Cost, Cost],
    honours: frozenset[str] = frozenset(),
    graph_safe: bool = False,
) -> tuple[Impl, ...]:
    """The torch version of `op` and its reference, once per layout of `role`.

    `loads`: where they are, counted from this package; `costs`: of a layout's id, in that order.
    Most torch versions ask the host about lengths and cannot be captured; `graph_safe`: this can.
    """
    fast = portable(op, loads[0], graph_safe=graph_safe, honours=honours)
    plain = reference(op, loads[1], honours=honours)
    return (
        *per_layout(role, layouts, costs[0], fast),
        *per_layout(role, layouts, costs[1], plain),
    )


def torch_static(
    op: str,
    role: str,
    layouts: Mapping[str, str],
    load: str,
    cost: Cost,
    honours: frozenset[str] = frozenset(),
) -> tuple[Impl, ...]:
    """The torch version of `op` that asks the host nothing, once per layout of `role`: for a
    device whose steps are captured and that has no kernel of its own."""
    captured = portable(op, load, name="torch-static", honours=honours)
    return per_layout(role, layouts, cost, captured)


def entry_bytes(layout: str, context: Context, channels: str = "d") -> int:
    """Bytes of one entry of `layout` in the request's dtype; its tail is `rotated`."""
    dtype = context.request.dtype
    stored = dtype if dtype in BYTES else "float32"
    return entry_form(
        layout, extent(context, channels), extent(context, "rotated", 0), stored
    ).bytes


def moved(layout: str, entries: float, context: Context) -> float:
    """Bytes to read `entries` entries and to hold them widened, or the reverse.

    A scaled form is decoded through a table, scales and a join: so many more passes (seed).
    """
    passes = 1 if layout in PLAIN else 6
    wide = max(width(context), 4) * extent(context, "d")
    return entries * (entry_bytes(layout, context) + passes * wide)
