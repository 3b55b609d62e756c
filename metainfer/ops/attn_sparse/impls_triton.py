"""Declared Triton implementations of `attn_sparse`, one per form of the latents."""

from collections.abc import Callable
from dataclasses import replace

from metainfer.core.verdict import Verdict
from metainfer.kernels.conditions import (
    capability,
    custom,
    feature,
    multiple_of,
    one_of,
    shared_memory,
)
from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context, Impl, Numerics
from metainfer.ops.attn_sparse.copies import decoded, entries_of
from metainfer.ops.attn_sparse.tiles import HOPPER, decodes_first, tile_for
from metainfer.ops.declare import HALVES, SHORT, TRITON, own_matrix_unit, triton
from metainfer.ops.declare_entries import entry_bytes


def _fits(context: Context) -> Verdict:
    scaled = context.layouts.get("kv") == "latent-fp8@1"
    card = context.facts.device.capability
    needed = tile_for(card, scaled).shared_bytes(extent(context, "d"), width(context), card, scaled)
    return shared_memory(needed)(context)


def keys_of(c: Context) -> int:
    return min(extent(c, "context", 1024), extent(c, "window", 128)) + entries_of(c)[1]


def _cost(
    layout: str, launches: int, compute: float, part: float = 0.4
) -> Callable[[Context], float | None]:
    """Every key once per query through the cache, queries in and out. Parts as on an H200."""

    def traffic(c: Context) -> float:
        queries = 2 * extent(c, "hq") * extent(c, "d") * width(c)
        return float(extent(c, "rows") * (keys_of(c) * entry_bytes(layout, c) + queries))

    def operations(c: Context) -> float:
        return 4.0 * extent(c, "rows") * extent(c, "hq") * keys_of(c) * extent(c, "d")

    return roofline(traffic, operations, launches=launches, part=part, compute_part=compute)


def _scaled_cost(
    each: Callable[[Context], float | None], plain: Callable[[Context], float | None]
) -> Callable[[Context], float | None]:
    """Keys decoded by every query; or once, and then as `latent@1`."""

    def seconds(c: Context) -> float | None:
        kept, listed = entries_of(c)
        sequences, window = extent(c, "seqs"), extent(c, "window", 128)
        once = decodes_first(extent(c, "rows"), sequences, window, listed, kept, extent(c, "d"))
        return (plain if once else each)(c)

    return seconds


def _hopper(c: Context) -> float | None:
    """Neighbours of a chunk find each other's keys in the second cache: 0.46 and 1.86 ms for 2,048
    and 8,192 queries of 640 keys (record 2026-11-30-h200-vendors-adapters)."""
    chunk = extent(c, "rows") > extent(c, "seqs")
    cost = _cost("latent@1", 3, 0.54, 0.85) if chunk else _cost("latent@1", 3, 0.5)
    return cost(c)


_DECODING = _cost("latent-fp8@1", 3, 0.05)

_LATENT: Impl = triton(
    "attn_sparse",
    "attn_sparse.triton_calls:attn_sparse",
    dtypes=SHORT,
    conditions=(*TRITON, one_of("d", (32, 64, 128, 256, 512)), _fits),
    requires_layout={"kv": "latent@1"},
    honours=frozenset({"selected", "entries"}),
    native_when=(own_matrix_unit,),
    numerics=Numerics.NATIVE,
    cost=_cost("latent@1", 3, 0.33),
)
_HOPPER: Impl = replace(
    _LATENT,
    name="triton-wgmma",
    dtypes=HALVES,
    conditions=(
        *TRITON,
        capability((9, 0), (9, 9)),
        feature("wgmma"),
        one_of("d", (512,)),
        multiple_of("hq", HOPPER.heads),
        shared_memory(HOPPER.shared_bytes(512, 2)),
    ),
    load="metainfer.ops.attn_sparse.triton_calls:wgmma",
    cost=_hopper,
)


def _over_fp8(impl: Impl, load: str) -> Impl:
    """`impl` over ``latent-fp8@1``."""
    assert impl.cost is not None
    return replace(
        impl,
        name=f"{impl.name}-fp8",
        dtypes=frozenset({"bfloat16"}),
        conditions=(
            *impl.conditions,
            _fits,
            custom(
                "shape",
                lambda c: (extent(c, "d") - extent(c, "rotated", 0)) % 64 == 0,
                "channels that are not rotated come in groups of 64",
            ),
        ),
        requires_layout={"kv": "latent-fp8@1"},
        load=f"metainfer.ops.attn_sparse.triton_calls:{load}",
        cost=_scaled_cost(_DECODING, impl.cost),
        copies=decoded,
    )


IMPLS = (
    _HOPPER,
    _over_fp8(_HOPPER, "wgmma_scaled"),
    _LATENT,
    _over_fp8(_LATENT, "attn_sparse_scaled"),
)
