"""Declared implementations of `index_query` and `index_select`, and the layouts of index keys."""

from collections.abc import Callable

from metainfer.kernels.cost import elementwise, extent, roofline, width
from metainfer.kernels.impl import Context, Layout
from metainfer.ops.declare_entries import KEYS, moved, torch_and_reference, torch_static
from metainfer.ops.indexer.impls_triton import IMPLS as TRITON_IMPLS

LAYOUTS = (
    # Pages [P, entries, width] in the model's type, as the norm and the rotation leave them.
    Layout(id="index@1", role="index"),
    # After the Hadamard matrix: e4m3 with a float32 scale a key; e2m1 with a scale byte per group.
    Layout(id="index-fp8@1", role="index"),
    Layout(id="index-fp4@1", role="index"),
)


def _values(passes: float) -> Callable[[Context], float]:
    """`passes` over the queries, each a read and a write."""

    def amount(c: Context) -> float:
        return 2.0 * passes * extent(c, "rows") * extent(c, "heads") * extent(c, "d")

    return amount


def _query_cost(
    plain: float, mixed: float, launches: int, part: float
) -> Callable[[str], Callable[[Context], float | None]]:
    """Passes of a plain form, and of one that mixes and rounds (seeds)."""
    return lambda layout: elementwise(
        _values(plain if layout == "index@1" else mixed), launches=launches, part=part
    )


def _entries(c: Context) -> int:
    return extent(c, "context", 1024) // extent(c, "ratio", 4)


def _select_cost(
    passes: float, launches: int, part: float, compute_part: float
) -> Callable[[str], Callable[[Context], float | None]]:
    """Keys of every sequence, products per head, `passes` over the scores (seed)."""

    def operations(c: Context) -> float:
        return 2.0 * extent(c, "rows") * extent(c, "heads") * _entries(c) * extent(c, "d")

    def made(layout: str) -> Callable[[Context], float | None]:
        def traffic(c: Context) -> float:
            rows, heads, entries = extent(c, "rows"), extent(c, "heads"), _entries(c)
            keys = moved(layout, extent(c, "seqs") * entries, c)
            queries = rows * heads * extent(c, "d") * width(c)
            return float(keys + queries + rows * entries * (3 * heads + passes) * 4)

        return roofline(
            traffic,
            operations,
            launches=launches,
            part=part,
            compute_part=compute_part,
            element="float32",
        )

    return made


IMPLS = (
    *TRITON_IMPLS,
    *torch_and_reference(
        "index_query",
        "index",
        KEYS,
        ("indexer.torch_select:index_query", "indexer.ref:index_query"),
        (_query_cost(3, 16, 20, 0.4), _query_cost(4, 24, 40, 0.3)),
        graph_safe=True,
    ),
    *torch_and_reference(
        "index_select",
        "index",
        KEYS,
        ("indexer.torch_select:index_select", "indexer.ref:index_select"),
        (_select_cost(12, 20, 0.4, 0.7), _select_cost(40, 20, 0.3, 0.7)),
    ),
    *torch_static(
        "index_select",
        "index",
        KEYS,
        "indexer.torch_static:index_select",
        _select_cost(100, 30, 0.4, 0.7),
    ),
)
