"""Declared implementations of `attn_paged`."""

from collections.abc import Callable

from metainfer.core.step import Phase
from metainfer.core.verdict import Verdict
from metainfer.kernels.conditions import at_most, custom, multiple_of, one_of, shared_memory
from metainfer.kernels.cost import attention_operations, attention_traffic, extent, roofline, width
from metainfer.kernels.impl import Condition, Context, Impl
from metainfer.ops.attn_paged.masks import WORKSPACE
from metainfer.ops.attn_paged.tiles import HEAD_DIMS, NARROW, SPLIT, WIDE, Tile, wide_for
from metainfer.ops.declare import (
    C_ON_CPU,
    FLOAT32,
    FLOATS,
    NATIVE_ON_CPU,
    ON_EITHER,
    SHORT,
    TRITON,
    own_matrix_unit,
)

PAGES = {"kv": "kv-pages@1"}
WINDOW = frozenset({"window"})


def _group(context: Context) -> int:
    """Query heads per cache head; 0 when they do not divide."""
    hq, hkv = context.request.shape.get("hq", 0), context.request.shape.get("hkv", 0)
    return hq // hkv if hkv and hq % hkv == 0 else 0


def _fits(tiles: Callable[[tuple[int, int] | None], tuple[Tile, ...]]) -> Condition:
    """Every tile of the card fits the card's shared memory at this head width and element size."""

    def check(context: Context) -> Verdict:
        d = extent(context, "d")
        capability = context.facts.device.capability
        needed = max(tile.shared_bytes(d, width(context), capability) for tile in tiles(capability))
        return shared_memory(needed)(context)

    return check


def _gathered(c: Context) -> int:
    """Keys and values of one sequence, and a block of masks."""
    of_a_token = 2 * extent(c, "hkv") * extent(c, "d") * width(c)
    return extent(c, "context", 1024) * of_a_token + WORKSPACE


_PAGE_SIZES = one_of("page", (16, 32, 64))
_GROUPS = custom("shape", lambda c: 1 <= _group(c) <= 16, "Hq / Hkv must be whole, at most 16")
_TRITON = (*TRITON, one_of("d", HEAD_DIMS), _PAGE_SIZES, _GROUPS)

IMPLS = (
    Impl(
        op="attn_paged",
        name="triton-split",
        load="metainfer.ops.attn_paged.triton:attn_decode",
        provider="triton",
        dtypes=SHORT,
        phases=frozenset({Phase.DECODE}),
        conditions=(*_TRITON, _fits(lambda capability: (SPLIT,))),
        requires_layout=PAGES,
        honours=WINDOW,
        native_when=(own_matrix_unit,),
        graph_safe=True,
        cost=roofline(attention_traffic(), attention_operations, launches=2, part=0.75),
        tile={"m": SPLIT.m, "n": SPLIT.n, "warps": SPLIT.warps, "stages": SPLIT.stages},
    ),
    Impl(
        op="attn_paged",
        name="triton",
        load="metainfer.ops.attn_paged.triton:attn_paged",
        provider="triton",
        dtypes=SHORT,
        conditions=(*_TRITON, _fits(lambda capability: (wide_for(capability), NARROW))),
        requires_layout=PAGES,
        honours=WINDOW,
        native_when=(own_matrix_unit,),
        graph_safe=True,
        cost=roofline(attention_traffic(), attention_operations, part=0.3, compute_part=0.35),
        tile={"m": WIDE.m, "n": WIDE.n, "warps": WIDE.warps, "stages": WIDE.stages},
    ),
    Impl(
        op="attn_paged",
        name="c",
        load="metainfer.ops.attn_paged.cpu_c:attn_paged",
        provider="c",
        dtypes=FLOAT32,
        conditions=(
            *C_ON_CPU,
            multiple_of("d", 16),
            at_most("d", 256),
            custom("shape", lambda c: 1 <= _group(c) <= 96, "Hq / Hkv must be whole, at most 96"),
        ),
        requires_layout=PAGES,
        honours=WINDOW,
        native_when=NATIVE_ON_CPU,
        cost=roofline(attention_traffic(), attention_operations, part=0.7),
    ),
    Impl(
        op="attn_paged",
        name="torch",
        load="metainfer.ops.attn_paged.torch_sdpa:attn_paged",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        requires_layout=PAGES,
        honours=WINDOW,
        native_when=NATIVE_ON_CPU,
        cost=roofline(attention_traffic(3), attention_operations, launches=12, part=0.5),
        copies=_gathered,
    ),
    Impl(
        op="attn_paged",
        name="ref",
        load="metainfer.ops.attn_paged.ref:attn_paged",
        provider="reference",
        dtypes=FLOATS,
        requires_layout=PAGES,
        honours=WINDOW,
        cost=roofline(
            attention_traffic(12), attention_operations, launches=30, part=0.3, element="float32"
        ),
    ),
)
