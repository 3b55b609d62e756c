"""Declared implementations of the hyper-connection ops."""

from collections.abc import Callable

from metainfer.kernels.conditions import at_most
from metainfer.kernels.cost import elementwise, extent, roofline, width
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import TRITON, portable, reference, triton
from metainfer.ops.hyper.tiles import MAX_STREAMS, MAX_WIDTH, SHORT_ROWS

Cost = Callable[[Context], float | None]


def _cost(copies: int, launches: int, part: float) -> Cost:
    """The streams pass `copies` times."""

    def values(c: Context) -> float:
        return float(copies * extent(c, "rows") * extent(c, "n", 4) * extent(c, "d"))

    return elementwise(values, launches=launches, part=part)


def _site_cost(mix: bool, part: float) -> Cost:
    """The streams read by the site's product and by the collapse, x written, the float32 matrix
    once, in two launches; `mix`: they are written, too, of many tokens in a launch of its own."""

    def seconds(c: Context) -> float | None:
        n, d, rows = extent(c, "n", 4), extent(c, "d"), extent(c, "rows")
        apart = mix and rows > SHORT_ROWS
        copies = 2 + mix + apart + (1 + mix) / n

        def traffic(c: Context) -> float:
            return copies * rows * n * d * width(c) + 4.0 * (n + 2) * n * n * d

        return roofline(traffic, launches=2 + apart, part=part)(c)

    return seconds


_NARROW = (*TRITON, at_most("n", MAX_STREAMS), at_most("d", MAX_WIDTH))


def _triton(op: str, cost: Cost) -> Impl:
    return triton(op, f"hyper.triton_calls:{op}", conditions=_NARROW, cost=cost)


IMPLS = (
    _triton("hyper_pre", _site_cost(False, 0.5)),
    portable("hyper_pre", "hyper.torch_hyper:hyper_pre", cost=_cost(4, 96, 0.3)),
    reference("hyper_pre", "hyper.ref:hyper_pre", graph_safe=True, cost=_cost(5, 140, 0.15)),
    _triton("hyper_mix_pre", _site_cost(True, 0.6)),
    portable("hyper_mix_pre", "hyper.torch_hyper:hyper_mix_pre", cost=_cost(8, 100, 0.28)),
    reference(
        "hyper_mix_pre", "hyper.ref:hyper_mix_pre", graph_safe=True, cost=_cost(10, 146, 0.15)
    ),
    reference(
        "hyper_triplet", "hyper.ref:hyper_triplet", graph_safe=True, cost=_cost(3, 130, 0.15)
    ),
    reference(
        "hyper_collapse", "hyper.ref:hyper_collapse", graph_safe=True, cost=_cost(3, 4, 0.15)
    ),
    _triton("hyper_mix", _cost(3, 1, 0.8)),
    portable("hyper_mix", "hyper.torch_hyper:hyper_mix", cost=_cost(4, 4, 0.25)),
    reference("hyper_mix", "hyper.ref:hyper_mix", graph_safe=True, cost=_cost(5, 6, 0.15)),
    _triton("hyper_head", _site_cost(False, 0.5)),
    portable("hyper_head", "hyper.torch_hyper:hyper_head", cost=_cost(4, 12, 0.25)),
    reference("hyper_head", "hyper.ref:hyper_head", graph_safe=True, cost=_cost(6, 14, 0.15)),
)
