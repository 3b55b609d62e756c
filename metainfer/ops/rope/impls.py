"""Declared implementations of `rope`."""

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import FLOATS, NATIVE_ON_CPU, ON_EITHER

HONOURS = frozenset({"interleaved", "partial"})


def _values(c: Context) -> float:
    return 2.0 * extent(c, "rows") * (extent(c, "hq") + extent(c, "hkv")) * extent(c, "d")


IMPLS = (
    Impl(
        op="rope",
        name="torch",
        load="metainfer.ops.rope.torch_rope:rope",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        honours=HONOURS,
        native_when=NATIVE_ON_CPU,
        graph_safe=True,
        cost=elementwise(_values, launches=16, part=0.25),
    ),
    Impl(
        op="rope",
        name="ref",
        load="metainfer.ops.rope.ref:rope",
        provider="reference",
        dtypes=FLOATS,
        honours=HONOURS,
        graph_safe=True,
        cost=elementwise(_values, launches=24, part=0.15),
    ),
)
