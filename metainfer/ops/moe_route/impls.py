"""Declared implementations of `moe_route` and `moe_route_hash`."""

from collections.abc import Callable

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context
from metainfer.ops.declare import portable, reference


def _cost(passes: int, launches: int) -> Callable[[Context], float | None]:
    """Activations, the gate, and the scores passed a number of times (seeds)."""

    def values(c: Context) -> float:
        rows, k, e = (extent(c, name) for name in ("rows", "k", "e"))
        return float(rows * k + e * k + passes * rows * e)

    return elementwise(values, launches=launches, part=0.3)


IMPLS = (
    portable("moe_route", "moe_route.torch_route:moe_route", cost=_cost(8, 14)),
    reference("moe_route", "moe_route.ref:moe_route", graph_safe=True, cost=_cost(12, 16)),
    portable("moe_route_hash", "moe_route.torch_route:moe_route_hash", cost=_cost(3, 9)),
    reference("moe_route_hash", "moe_route.ref:moe_route_hash", graph_safe=True, cost=_cost(4, 12)),
)
