"""Declared implementations of `compress`."""

from metainfer.kernels.cost import extent, roofline
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import FLOATS


def _traffic(c: Context) -> float:
    """Raw rows of two halves in float32, passed about twelve times (seed)."""
    return 12.0 * extent(c, "rows") * extent(c, "d") * 2 * 4


IMPLS = (
    Impl(
        op="compress",
        name="ref",
        load="metainfer.ops.compress.ref:compress",
        provider="reference",
        dtypes=FLOATS,
        honours=frozenset({"overlap"}),
        cost=roofline(_traffic, launches=30, part=0.3),
    ),
)
