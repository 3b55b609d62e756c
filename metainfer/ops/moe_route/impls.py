"""Declared implementations of `moe_route` and `moe_route_hash`."""

from collections.abc import Callable

from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context
from metainfer.ops.declare import portable, reference
from metainfer.ops.moe_route.impls_triton import IMPLS as TRITON_IMPLS


def _cost(passes: int, launches: int) -> Callable[[Context], float | None]:
    """Activations, the gate, the scores passed a number of times (seeds); products in float32."""

    def traffic(c: Context) -> float:
        rows, k, e = (extent(c, name) for name in ("rows", "k", "e"))
        return float(rows * k + e * k + passes * rows * e) * width(c)

    def operations(c: Context) -> float:
        return 2.0 * extent(c, "rows") * extent(c, "k") * extent(c, "e")

    return roofline(traffic, operations, launches=launches, part=0.3, element="float32")


IMPLS = (
    *TRITON_IMPLS,
    portable("moe_route", "moe_route.torch_route:moe_route", cost=_cost(8, 14)),
    reference("moe_route", "moe_route.ref:moe_route", graph_safe=True, cost=_cost(12, 16)),
    portable("moe_route_hash", "moe_route.torch_route:moe_route_hash", cost=_cost(3, 9)),
    reference("moe_route_hash", "moe_route.ref:moe_route_hash", graph_safe=True, cost=_cost(4, 12)),
)
