"""Declared implementations of `attn_sparse`."""

from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import FLOATS


def _keys(c: Context) -> int:
    """Keys of one query: its window and its entries."""
    ratio, context = extent(c, "ratio", 0), extent(c, "context", 1024)
    visible = context // ratio if ratio else 0
    top_k = extent(c, "top_k", 0)
    return min(context, extent(c, "window", 128)) + (min(top_k, visible) if top_k else visible)


def _traffic(c: Context) -> float:
    """All tokens and entries gathered and widened, logits passed about four times (seed)."""
    cached = extent(c, "seqs") * extent(c, "context", 1024) * extent(c, "d")
    logits = extent(c, "rows") * extent(c, "hq") * extent(c, "context", 1024)
    return float(cached * (width(c) + 8) + logits * 16)


def _operations(c: Context) -> float:
    return 4.0 * extent(c, "rows") * extent(c, "hq") * _keys(c) * extent(c, "d")


IMPLS = (
    Impl(
        op="attn_sparse",
        name="ref",
        load="metainfer.ops.attn_sparse.ref:attn_sparse",
        provider="reference",
        dtypes=FLOATS,
        honours=frozenset({"selected", "entries"}),
        cost=roofline(_traffic, _operations, launches=40, part=0.3, element="float32"),
    ),
)
