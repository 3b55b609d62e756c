"""Declared Triton implementations of `moe_route` and `moe_route_hash`."""

from metainfer.core.verdict import Verdict
from metainfer.kernels.conditions import at_most, shared_memory
from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context
from metainfer.ops.declare import SHORT, TRITON, own_matrix_unit, triton
from metainfer.ops.moe_route.tiles import TILES


def _fits(context: Context) -> Verdict:
    """Whatever type the gate has."""
    most = max(tile.shared_bytes(width(context), 4) for tile in TILES.values())
    return shared_memory(most)(context)


def _traffic(c: Context) -> float:
    """Tokens and gate once, scores in float32 written and read."""
    rows, k, e = (extent(c, name) for name in ("rows", "k", "e"))
    return float((rows + e) * k * width(c) + 2 * rows * e * 4)


def _operations(c: Context) -> float:
    """One product where the gate has the tokens' type."""
    return 2.0 * extent(c, "rows") * extent(c, "k") * extent(c, "e")


IMPLS = tuple(
    triton(
        op,
        f"moe_route.triton_calls:{op}",
        dtypes=SHORT,
        conditions=(*TRITON, at_most("e", 512), at_most("top_k", 16), _fits),
        native_when=(own_matrix_unit,),
        cost=roofline(_traffic, _operations, launches=2, part=0.4, compute_part=0.3),
    )
    for op in ("moe_route", "moe_route_hash")
)
