"""Declared implementations of `out_group`."""

from collections.abc import Callable

from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context
from metainfer.ops.declare import (
    DENSE,
    FLOAT32,
    ON_CPU,
    RECIPE,
    STORED,
    portable,
    reference,
)


def _traffic(each: float) -> Callable[[Context], float]:
    """The matrices at their size and `each` more bytes of an element, and the rows."""

    def amount(c: Context) -> float:
        heads, n = extent(c, "hq") * extent(c, "d"), extent(c, "n")
        rows = extent(c, "rows") * (heads + extent(c, "groups") * n)
        return float((heads * n + rows) * (width(c) + each))

    return amount


def _operations(c: Context) -> float:
    return 2.0 * extent(c, "rows") * extent(c, "hq") * extent(c, "d") * extent(c, "n")


IMPLS = (
    portable(
        "out_group",
        "out_group.torch_group:out_group",
        requires_layout=DENSE,
        cost=roofline(_traffic(0), _operations, launches=3, part=0.5, compute_part=0.45),
    ),
    portable(
        "out_group",
        "out_group.torch_group:out_group_apart",
        name="onednn",
        dtypes=FLOAT32,
        conditions=(ON_CPU,),
        requires_layout={"weight": "onednn-f32@1"},
        graph_safe=False,
        cost=roofline(_traffic(0), _operations, launches=3, part=0.5, compute_part=0.45),
    ),
    portable(
        "out_group",
        "out_group.torch_group:out_group_stored",
        name="recipe",
        conditions=RECIPE,
        requires_layout=STORED,
        cost=roofline(_traffic(0), _operations, launches=3, part=0.5, compute_part=0.45),
    ),
    reference(
        "out_group",
        "out_group.ref:out_group",
        requires_layout=DENSE,
        graph_safe=True,
        cost=roofline(_traffic(8), _operations, launches=5, part=0.5, element="float32"),
    ),
)
