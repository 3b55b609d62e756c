"""Declared implementations of `moe_experts`, and the layouts of packed experts."""

from metainfer.formats.blocks import FORMATS
from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context, Impl, Layout
from metainfer.ops.declare import FLOATS, PLAIN

CLAMP = frozenset({"clamp"})
DENSE = {"experts": "experts-dense@1"}

LAYOUTS = (
    Layout(
        id="experts-dense@1",
        role="experts",
        pack="metainfer.ops.moe_experts.layouts:pack_dense",
        schemes=PLAIN | frozenset(FORMATS),
    ),
)


def _matrices(c: Context) -> int:
    """Experts read: all of them, or as many as the rows can choose."""
    return min(extent(c, "e"), extent(c, "rows") * extent(c, "top_k"))


def _traffic(c: Context) -> float:
    """Matrices of the experts read, in their own type and widened, and the rows."""
    size = 3 * extent(c, "d") * extent(c, "f")
    return float(_matrices(c) * size * (width(c) + 8) + extent(c, "rows") * extent(c, "d") * 12)


def _operations(c: Context) -> float:
    return 6.0 * extent(c, "rows") * extent(c, "top_k") * extent(c, "d") * extent(c, "f")


IMPLS = (
    Impl(
        op="moe_experts",
        name="ref",
        load="metainfer.ops.moe_experts.ref:moe_experts",
        provider="reference",
        dtypes=FLOATS,
        requires_layout=DENSE,
        honours=CLAMP,
        cost=roofline(_traffic, _operations, launches=256, part=0.3, element="float32"),
    ),
)
