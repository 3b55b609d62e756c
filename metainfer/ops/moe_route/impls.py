"""Declared implementations of `moe_route` and `moe_route_hash`."""

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import FLOATS


def _values(c: Context) -> float:
    """Activations, the gate, and the scores passed about ten times by the sort (seed)."""
    rows, k, e = (extent(c, name) for name in ("rows", "k", "e"))
    return float(rows * k + e * k + 10 * rows * e)


IMPLS = tuple(
    Impl(
        op=op,
        name="ref",
        load=f"metainfer.ops.moe_route.ref:{op}",
        provider="reference",
        dtypes=FLOATS,
        graph_safe=True,
        cost=elementwise(_values, launches=launches, part=0.3),
    )
    for op, launches in (("moe_route", 14), ("moe_route_hash", 12))
)
