"""Declared Triton implementations of `attn_sparse`, one per form of the latents."""

from collections.abc import Callable
from dataclasses import replace

from metainfer.core.verdict import Verdict
from metainfer.kernels.conditions import custom, one_of, shared_memory
from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context, Impl, Numerics
from metainfer.ops.attn_sparse.tiles import decodes_first, tile_for
from metainfer.ops.declare import SHORT, TRITON, own_matrix_unit, triton
from metainfer.ops.declare_entries import entry_bytes


def _fits(context: Context) -> Verdict:
    scaled = context.layouts.get("kv") == "latent-fp8@1"
    card = context.facts.device.capability
    needed = tile_for(card, scaled).shared_bytes(extent(context, "d"), width(context), card, scaled)
    return shared_memory(needed)(context)


def _entries(c: Context) -> tuple[int, int]:
    """Compressed entries of a sequence, and of them per query."""
    ratio, context, top = extent(c, "ratio", 0), extent(c, "context", 1024), extent(c, "top_k", 0)
    kept = context // ratio if ratio else 0
    return kept, min(top, kept) if top else kept


def _keys(c: Context) -> int:
    return min(extent(c, "context", 1024), extent(c, "window", 128)) + _entries(c)[1]


def _scaled_cost(c: Context) -> float | None:
    """Keys decoded by every query; or once, and then as `latent@1` (a seed: not measured yet)."""
    kept, listed = _entries(c)
    sequences, window = extent(c, "seqs"), extent(c, "window", 128)
    once = decodes_first(extent(c, "rows"), sequences, window, listed, kept, extent(c, "d"))
    return (_DECODED if once else _DECODING)(c)


def _cost(layout: str, launches: int, compute: float) -> Callable[[Context], float | None]:
    """Every key once per query through the cache, queries in and out. Parts as on an H200."""

    def traffic(c: Context) -> float:
        queries = 2 * extent(c, "hq") * extent(c, "d") * width(c)
        return float(extent(c, "rows") * (_keys(c) * entry_bytes(layout, c) + queries))

    def operations(c: Context) -> float:
        return 4.0 * extent(c, "rows") * extent(c, "hq") * _keys(c) * extent(c, "d")

    return roofline(traffic, operations, launches=launches, part=0.4, compute_part=compute)


_DECODING, _DECODED = _cost("latent-fp8@1", 3, 0.05), _cost("latent@1", 5, 0.33)

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

IMPLS = (
    _LATENT,
    replace(
        _LATENT,
        name="triton-fp8",
        dtypes=frozenset({"bfloat16"}),
        conditions=(
            *_LATENT.conditions,
            custom(
                "shape",
                lambda c: (extent(c, "d") - extent(c, "rotated", 0)) % 64 == 0,
                "channels that are not rotated come in groups of 64",
            ),
        ),
        requires_layout={"kv": "latent-fp8@1"},
        load="metainfer.ops.attn_sparse.triton_calls:attn_sparse_scaled",
        cost=_scaled_cost,
    ),
)
