"""Declared implementations of `compress` and `compress_index`."""

from collections.abc import Callable

from metainfer.kernels.cost import extent, roofline
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import FLOATS, NATIVE_ON_CPU, ON_EITHER
from metainfer.ops.declare_entries import KEYS, LATENTS, moved, per_layout


def _cost(
    passes: float, launches: int, part: float
) -> Callable[[str], Callable[[Context], float | None]]:
    """`passes` over the raw float32 rows (gates and values, two halves), and the entries made."""

    def made(layout: str) -> Callable[[Context], float | None]:
        def traffic(c: Context) -> float:
            rows = extent(c, "rows")
            entries = rows / extent(c, "ratio", 4)
            return passes * rows * extent(c, "d") * 4 * 4 + moved(layout, entries, c)

        return roofline(traffic, launches=launches, part=part)

    return made


def _declared(op: str, role: str, layouts: "dict[str, str]") -> tuple[Impl, ...]:
    vectorised = Impl(
        op=op,
        name="torch",
        load="metainfer.ops.compress.torch_compress:compress",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        honours=frozenset({"overlap"}),
        native_when=NATIVE_ON_CPU,
    )
    reference = Impl(
        op=op,
        name="ref",
        load="metainfer.ops.compress.ref:compress",
        provider="reference",
        dtypes=FLOATS,
        honours=frozenset({"overlap"}),
    )
    return (
        *per_layout(role, layouts, _cost(4, 40, 0.4), vectorised),
        # One sequence after the other.
        *per_layout(role, layouts, _cost(6, 200, 0.3), reference),
    )


IMPLS = (
    *_declared("compress", "kv", dict(LATENTS)),
    *_declared("compress_index", "index", dict(KEYS)),
)
