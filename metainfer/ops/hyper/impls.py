"""Declared implementations of the hyper-connection ops."""

from collections.abc import Callable

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context
from metainfer.ops.declare import portable, reference

Cost = Callable[[Context], float | None]


def _cost(copies: int, launches: int, part: float) -> Cost:
    """The streams pass `copies` times."""

    def values(c: Context) -> float:
        return float(copies * extent(c, "rows") * extent(c, "n", 4) * extent(c, "d"))

    return elementwise(values, launches=launches, part=part)


IMPLS = (
    portable("hyper_pre", "hyper.torch_hyper:hyper_pre", cost=_cost(4, 96, 0.3)),
    reference("hyper_pre", "hyper.ref:hyper_pre", graph_safe=True, cost=_cost(5, 140, 0.15)),
    reference(
        "hyper_triplet", "hyper.ref:hyper_triplet", graph_safe=True, cost=_cost(3, 130, 0.15)
    ),
    reference(
        "hyper_collapse", "hyper.ref:hyper_collapse", graph_safe=True, cost=_cost(3, 4, 0.15)
    ),
    portable("hyper_mix", "hyper.torch_hyper:hyper_mix", cost=_cost(4, 4, 0.25)),
    reference("hyper_mix", "hyper.ref:hyper_mix", graph_safe=True, cost=_cost(5, 6, 0.15)),
    portable("hyper_head", "hyper.torch_hyper:hyper_head", cost=_cost(4, 12, 0.25)),
    reference("hyper_head", "hyper.ref:hyper_head", graph_safe=True, cost=_cost(6, 14, 0.15)),
)
