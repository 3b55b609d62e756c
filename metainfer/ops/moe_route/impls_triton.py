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
    """Tokens once, the gate in float32 (seed: it comes from the cache for each block of many)."""
    rows, k, e = (extent(c, name) for name in ("rows", "k", "e"))
    return float(rows * k * width(c) + e * k * 4 * max(1.0, rows / 256))


def _operations(c: Context) -> float:
    """Three products where the gate is float32."""
    return 6.0 * extent(c, "rows") * extent(c, "k") * extent(c, "e")


IMPLS = tuple(
    triton(
        op,
        f"moe_route.triton_calls:{op}",
        dtypes=SHORT,
        conditions=(*TRITON, at_most("e", 512), at_most("top_k", 16), _fits),
        native_when=(own_matrix_unit,),
        cost=roofline(_traffic, _operations, launches=1, part=0.4, compute_part=0.3),
    )
    for op in ("moe_route", "moe_route_hash")
)
