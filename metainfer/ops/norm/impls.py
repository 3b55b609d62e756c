"""Declared implementations of `rmsnorm` and `add_rmsnorm`."""

from collections.abc import Callable

from metainfer.kernels.conditions import at_most
from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context
from metainfer.ops.declare import TRITON, compiled_c, portable, reference, thread_settings, triton
from metainfer.ops.norm.tiles import MAX_WIDTH


def _values(copies: float) -> Callable[[Context], float]:
    return lambda c: copies * extent(c, "rows") * extent(c, "d")


def _cost(
    copies: float, *, launches: int = 1, part: float = 1.0
) -> Callable[[Context], float | None]:
    return elementwise(_values(copies), launches=launches, part=part)


_NARROW = (*TRITON, at_most("d", MAX_WIDTH))

IMPLS = (
    triton("rmsnorm", "norm.triton:rmsnorm", conditions=_NARROW, cost=_cost(2, part=0.8)),
    triton("add_rmsnorm", "norm.triton:add_rmsnorm", conditions=_NARROW, cost=_cost(4, part=0.8)),
    compiled_c("rmsnorm", "norm.cpu_c:rmsnorm", settings=thread_settings, cost=_cost(2, part=0.8)),
    portable("rmsnorm", "norm.torch_norm:rmsnorm", cost=_cost(2, launches=2, part=0.4)),
    reference("rmsnorm", "norm.ref:rmsnorm", graph_safe=True, cost=_cost(2, launches=8, part=0.12)),
    compiled_c(
        "add_rmsnorm", "norm.cpu_c:add_rmsnorm", settings=thread_settings, cost=_cost(4, part=0.8)
    ),
    portable("add_rmsnorm", "norm.torch_norm:add_rmsnorm", cost=_cost(4, launches=3, part=0.5)),
    reference(
        "add_rmsnorm",
        "norm.ref:add_rmsnorm",
        graph_safe=True,
        cost=_cost(4, launches=11, part=0.15),
    ),
)
