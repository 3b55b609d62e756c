"""Declared implementations of `embed`."""

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import FLOATS, NATIVE_ON_CPU, ON_EITHER


def _values(c: Context) -> float:
    return 2.0 * extent(c, "rows") * extent(c, "d")


IMPLS = (
    Impl(
        op="embed",
        name="torch",
        load="metainfer.ops.embed.torch_embed:embed",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        requires_layout={"weight": "dense@1"},
        native_when=NATIVE_ON_CPU,
        graph_safe=True,
        cost=elementwise(_values, part=0.6),
    ),
    Impl(
        op="embed",
        name="ref",
        load="metainfer.ops.embed.ref:embed",
        provider="reference",
        dtypes=FLOATS,
        requires_layout={"weight": "dense@1"},
        cost=elementwise(_values, launches=2, part=0.5),
    ),
)
