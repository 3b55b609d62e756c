"""Declared implementations of `attn_sparse`."""

from collections.abc import Callable
from dataclasses import replace

from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context
from metainfer.ops.attn_sparse.copies import gathered
from metainfer.ops.attn_sparse.impls_triton import IMPLS as TRITON_IMPLS
from metainfer.ops.attn_sparse.impls_vendor import IMPLS as VENDOR_IMPLS
from metainfer.ops.declare_entries import LATENTS, moved, torch_and_reference, torch_static


def _chosen(c: Context) -> int:
    """Entries of one query."""
    ratio, context = extent(c, "ratio", 0), extent(c, "context", 1024)
    visible = context // ratio if ratio else 0
    top_k = extent(c, "top_k", 0)
    return min(top_k, visible) if top_k else visible


def _keys(c: Context) -> int:
    """Keys of one query: its window and its entries."""
    return min(extent(c, "context", 1024), extent(c, "window", 128)) + _chosen(c)


def _operations(c: Context) -> float:
    return 4.0 * extent(c, "rows") * extent(c, "hq") * _keys(c) * extent(c, "d")


def _cost(
    reads: float, passes: float, launches: int, part: float
) -> Callable[[str], Callable[[Context], float | None]]:
    """Each query's keys `reads` times, its logits `passes` times, queries in and out (seeds)."""

    def made(layout: str) -> Callable[[Context], float | None]:
        def traffic(c: Context) -> float:
            rows, hq = extent(c, "rows"), extent(c, "hq")
            keys = moved(layout, rows * _keys(c), c)
            queries = 2.0 * rows * hq * extent(c, "d") * width(c)
            return reads * keys + queries + passes * rows * hq * _keys(c) * 4

        return roofline(traffic, _operations, launches=launches, part=part, element="float32")

    return made


_PORTABLE = torch_and_reference(
    "attn_sparse",
    "kv",
    LATENTS,
    ("attn_sparse.torch_sparse:attn_sparse", "attn_sparse.ref:attn_sparse"),
    (_cost(1, 4, 30, 0.4), _cost(1, 8, 40, 0.3)),
    frozenset({"selected", "entries"}),
)

IMPLS = (
    *TRITON_IMPLS,
    *VENDOR_IMPLS,
    *(replace(i, copies=gathered) if i.provider == "torch" else i for i in _PORTABLE),
    *torch_static(
        "attn_sparse",
        "kv",
        LATENTS,
        "attn_sparse.torch_static:attn_sparse",
        _cost(3, 6, 40, 0.4),
        frozenset({"selected", "entries"}),
    ),
)
