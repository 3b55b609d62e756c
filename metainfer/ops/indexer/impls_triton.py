"""Declared Triton implementations of `index_query` and `index_select`, per form of the keys."""

from collections.abc import Callable
from dataclasses import replace

from metainfer.core.verdict import Verdict
from metainfer.kernels.conditions import at_most, one_of, shared_memory
from metainfer.kernels.cost import elementwise, extent, roofline, width
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import ON_CUDA, SHORT, TRITON, own_matrix_unit, triton
from metainfer.ops.declare_entries import KEYS, entry_bytes, per_layout
from metainfer.ops.indexer.tiles import SCORE, STREAM


def _fits(context: Context) -> Verdict:
    heads, d = extent(context, "heads"), extent(context, "d")
    most = max(tile.shared_bytes(heads, d, width(context)) for tile in (SCORE, STREAM))
    return shared_memory(most)(context)


def _entries(c: Context) -> int:
    return extent(c, "context", 1024) // extent(c, "ratio", 4)


def _query_cost(layout: str) -> Callable[[Context], float | None]:
    """One read, one write (seed: a card of 9.0 had 0.67 to 0.95 of its bytes)."""
    return elementwise(
        lambda c: 2.0 * extent(c, "rows") * extent(c, "heads") * extent(c, "d"), part=0.7
    )


def _select_cost(layout: str) -> Callable[[Context], float | None]:
    """Keys of every sequence once, queries once, scores written and read three times (seeds: parts,
    readings; a card of 9.0 had 0.30 of its products at 8,192 tokens and 0.51 at 131,072)."""

    def traffic(c: Context) -> float:
        rows, entries = extent(c, "rows"), _entries(c)
        keys = extent(c, "seqs") * entries * entry_bytes(layout, c)
        return float(keys + rows * extent(c, "heads") * extent(c, "d") * 2 + rows * entries * 16)

    def operations(c: Context) -> float:
        return 2.0 * extent(c, "rows") * extent(c, "heads") * _entries(c) * extent(c, "d")

    return roofline(traffic, operations, launches=2, part=0.5, compute_part=0.4)


_QUERY = triton(
    "index_query",
    "indexer.triton_calls:index_query",
    conditions=(*TRITON, one_of("d", (16, 32, 64, 128, 256))),
    native_when=(ON_CUDA,),
)
_SELECT = triton(
    "index_select",
    "indexer.triton_calls:index_select",
    conditions=(*TRITON, one_of("d", (16, 32, 64, 128, 256)), at_most("heads", 128), _fits),
    native_when=(own_matrix_unit,),
)


def _types(impl: Impl) -> Impl:
    """float16 has no room for the scales of rounded keys."""
    if impl.requires_layout["index"] == "index@1":
        return replace(impl, dtypes=SHORT)
    return replace(impl, dtypes=SHORT - {"float16"})


IMPLS = tuple(
    _types(impl)
    for impl in (
        *per_layout("index", KEYS, _query_cost, _QUERY),
        *per_layout("index", KEYS, _select_cost, _SELECT),
    )
)
