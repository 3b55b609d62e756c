"""Declared implementations of `index_rotate` and `index_select`."""

from metainfer.kernels.cost import elementwise, extent, roofline, width
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import FLOATS


def _values(c: Context) -> float:
    """One pass per butterfly step, reads and writes."""
    d = extent(c, "d")
    return 2.0 * extent(c, "rows") * extent(c, "heads") * d * max(d.bit_length(), 1)


def _entries(c: Context) -> int:
    return extent(c, "context", 1024) // extent(c, "ratio", 4)


def _traffic(c: Context) -> float:
    """Keys of every sequence, products per head, and a sort of each row (seed: 40 passes)."""
    rows, heads, entries = extent(c, "rows"), extent(c, "heads"), _entries(c)
    keys = extent(c, "seqs") * entries * extent(c, "d") * width(c)
    return float(keys + rows * entries * (3 * heads + 40) * 4)


def _operations(c: Context) -> float:
    return 2.0 * extent(c, "rows") * extent(c, "heads") * _entries(c) * extent(c, "d")


IMPLS = (
    Impl(
        op="index_rotate",
        name="ref",
        load="metainfer.ops.indexer.ref:index_rotate",
        provider="reference",
        dtypes=FLOATS,
        honours=frozenset({"fp4"}),
        graph_safe=True,
        cost=elementwise(_values, launches=40, part=0.3),
    ),
    Impl(
        op="index_select",
        name="ref",
        load="metainfer.ops.indexer.ref:index_select",
        provider="reference",
        dtypes=FLOATS,
        cost=roofline(_traffic, _operations, launches=20, part=0.3, element="float32"),
    ),
)
