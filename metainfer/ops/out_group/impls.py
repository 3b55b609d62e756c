"""Declared implementations of `out_group`."""

from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import DENSE, FLOATS


def _traffic(c: Context) -> float:
    """The matrices, in their own type and widened, and the rows."""
    heads, n = extent(c, "hq") * extent(c, "d"), extent(c, "n")
    rows = extent(c, "rows") * (heads + extent(c, "groups") * n)
    return float((heads * n + rows) * (width(c) + 8))


def _operations(c: Context) -> float:
    return 2.0 * extent(c, "rows") * extent(c, "hq") * extent(c, "d") * extent(c, "n")


IMPLS = (
    Impl(
        op="out_group",
        name="ref",
        load="metainfer.ops.out_group.ref:out_group",
        provider="reference",
        dtypes=FLOATS,
        requires_layout=DENSE,
        graph_safe=True,
        cost=roofline(_traffic, _operations, launches=5, part=0.5, element="float32"),
    ),
)
