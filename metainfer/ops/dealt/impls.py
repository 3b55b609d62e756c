"""Declared implementations of the ops of a cache that is dealt over ranks."""

from collections.abc import Callable
from dataclasses import replace

from metainfer.core.verdict import Verdict
from metainfer.kernels.conditions import at_most, custom, one_of, shared_memory
from metainfer.kernels.cost import elementwise, extent, roofline, width
from metainfer.kernels.impl import Context
from metainfer.ops.attn_paged.tiles import HEAD_DIMS, SPLIT, rows_for
from metainfer.ops.declare import TRITON, own_matrix_unit, portable, reference, triton
from metainfer.ops.declare_entries import KEYS, LATENTS, moved, torch_and_reference

PAGES = {"kv": "kv-pages@1"}


def _mix(passes: float, launches: int, part: float) -> Callable[[str], Callable[..., float | None]]:
    """Keys of each query once, logits `passes` times, queries in and wide mixes out (seeds)."""

    def operations(c: Context) -> float:
        return 4.0 * extent(c, "rows") * extent(c, "hq") * extent(c, "top_k") * extent(c, "d")

    def made(layout: str) -> Callable[[Context], float | None]:
        def traffic(c: Context) -> float:
            rows, hq = extent(c, "rows"), extent(c, "hq")
            keys = moved(layout, rows * extent(c, "top_k"), c)
            queries = rows * hq * extent(c, "d") * (width(c) + 4)
            return float(keys + queries + passes * rows * hq * extent(c, "top_k") * 4)

        return roofline(traffic, operations, launches=launches, part=part, element="float32")

    return made


def _keys(c: Context) -> float:
    """Of all queries, each its rank's part of a context."""
    return float(extent(c, "rows") * extent(c, "context", 1024) / extent(c, "shards"))


def _read(c: Context) -> float:
    """Keys and values once, queries in and wide mixes out."""
    rows = extent(c, "rows") * extent(c, "hq") * extent(c, "d") * (width(c) + 4)
    return _keys(c) * extent(c, "hkv") * extent(c, "d") * 2 * width(c) + rows


def _products(c: Context) -> float:
    return 4.0 * _keys(c) * extent(c, "hq") * extent(c, "d")


def _paged(passes: float, launches: int, part: float) -> Callable[[Context], float | None]:
    """Each query's part of its context, widened (seeds)."""

    def traffic(c: Context) -> float:
        return passes * _keys(c) * extent(c, "hkv") * extent(c, "d") * 2 * (width(c) + 4)

    return roofline(traffic, _products, launches=launches, part=part, element="float32")


def _group(c: Context) -> int:
    """Query heads, of all ranks that share keys, for each cache head; 0 if they do not divide."""
    hq, hkv = extent(c, "hq", 0), extent(c, "hkv", 0)
    return int(hq // hkv) if hkv and hq % hkv == 0 else 0


def _fits(c: Context) -> Verdict:
    tile = replace(SPLIT, m=rows_for(SPLIT, max(_group(c), 1)))
    needed = tile.shared_bytes(int(extent(c, "d")), width(c), c.facts.device.capability)
    return shared_memory(needed)(c)


def _weighed(c: Context) -> float:
    """Elements of the mixes of all heads, read and written."""
    return 2.0 * extent(c, "rows") * extent(c, "hq") * extent(c, "d")


def _scored(passes: float, part: float) -> Callable[[str], Callable[[Context], float | None]]:
    """Keys of every query's part, products by head, `passes` over the scores (seeds)."""

    def entries(c: Context) -> float:
        span = extent(c, "ratio", 4) * extent(c, "shards")
        return extent(c, "rows") * extent(c, "context", 1024) / span

    def operations(c: Context) -> float:
        return 2.0 * extent(c, "heads") * entries(c) * extent(c, "d")

    def made(layout: str) -> Callable[[Context], float | None]:
        def traffic(c: Context) -> float:
            scores = entries(c) * (3 * extent(c, "heads") + passes) * 4
            return float(moved(layout, entries(c), c) + scores)

        return roofline(traffic, operations, launches=30, part=part, element="float32")

    return made


def _merged(passes: float) -> Callable[[Context], float]:
    return lambda c: passes * extent(c, "rows") * extent(c, "top_k") * extent(c, "shards") * 3


IMPLS = (
    *torch_and_reference(
        "attn_part",
        "kv",
        LATENTS,
        ("dealt.torch_dealt:attn_part", "dealt.ref:attn_part"),
        (_mix(4, 14, 0.4), _mix(8, 400, 0.3)),
        graph_safe=True,
    ),
    triton(
        "attn_paged_part",
        "dealt.triton:attn_paged_part",
        conditions=(
            *TRITON,
            one_of("d", HEAD_DIMS),
            one_of("page", (2, 4, 8, 16, 32, 64)),
            custom("shape", lambda c: 1 <= _group(c) <= 32, "Hq / Hkv must be whole, at most 32"),
            _fits,
        ),
        requires_layout=PAGES,
        native_when=(own_matrix_unit,),
        cost=roofline(_read, _products, launches=2, part=0.75),
        tile={"m": SPLIT.m, "n": SPLIT.n, "warps": SPLIT.warps, "stages": SPLIT.stages},
    ),
    portable(
        "attn_paged_part",
        "dealt.torch_dealt:attn_paged_part",
        by_table=True,
        requires_layout=PAGES,
        cost=_paged(3, 14, 0.4),
    ),
    reference(
        "attn_paged_part",
        "dealt.ref:attn_paged_part",
        requires_layout=PAGES,
        cost=_paged(6, 400, 0.3),
    ),
    triton(
        "attn_weigh",
        "dealt.triton_weigh:attn_weigh",
        conditions=(*TRITON, at_most("d", 1024)),
        cost=elementwise(_weighed, part=0.7),
    ),
    portable(
        "attn_weigh",
        "dealt.torch_dealt:attn_weigh",
        cost=elementwise(lambda c: 3 * _weighed(c), launches=18, part=0.4),
    ),
    reference(
        "attn_weigh",
        "dealt.ref:attn_weigh",
        cost=elementwise(lambda c: 4 * _weighed(c), launches=24, part=0.3),
    ),
    *(
        replace(each, by_table=True)
        for each in torch_and_reference(
            "index_part",
            "index",
            KEYS,
            ("dealt.torch_dealt:index_part", "dealt.ref:index_part"),
            (_scored(100, 0.4), _scored(100, 0.2)),
            graph_safe=True,
        )
    ),
    portable(
        "index_merge",
        "dealt.torch_dealt:index_merge",
        cost=elementwise(_merged(8), launches=18, part=0.3),
    ),
    reference(
        "index_merge",
        "dealt.ref:index_merge",
        cost=elementwise(_merged(800), launches=400, part=0.1),
    ),
)
