"""Declared implementations of the hyper-connection ops."""

from collections.abc import Callable

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import FLOATS


def _streams(copies: int) -> Callable[[Context], float]:
    """Values moved when the streams pass `copies` times."""
    return lambda c: float(copies * extent(c, "rows") * extent(c, "n", 4) * extent(c, "d"))


IMPLS = tuple(
    Impl(
        op=op,
        name="ref",
        load=f"metainfer.ops.hyper.ref:{op}",
        provider="reference",
        dtypes=FLOATS,
        graph_safe=True,
        cost=elementwise(_streams(copies), launches=launches, part=0.15),
    )
    for op, copies, launches in (
        ("hyper_pre", 5, 104),
        ("hyper_triplet", 3, 90),
        ("hyper_collapse", 3, 4),
        ("hyper_mix", 5, 6),
        ("hyper_head", 6, 14),
    )
)
