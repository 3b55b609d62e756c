"""Declared implementations of `attn_sparse` by libraries of others."""

from metainfer.core.step import Phase
from metainfer.kernels.conditions import capability, one_of, package
from metainfer.kernels.cost import extent, in_turn, roofline, width
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.attn_sparse.copies import entries_of, joined
from metainfer.ops.attn_sparse.impls_triton import keys_of
from metainfer.ops.declare import ON_CUDA, foreign, own_matrix_unit


def _prepared(c: Context) -> float:
    """Latents copied, rows of every key in eight passes, the turned channels in three."""
    latents = extent(c, "rows") + extent(c, "seqs") * (extent(c, "window", 128) + entries_of(c)[0])
    places = 8 * 4 * extent(c, "rows") * keys_of(c)
    turned = 20 * extent(c, "rows") * extent(c, "hq") * extent(c, "rotated", 64)
    return float(2 * latents * extent(c, "d") * width(c) + places + turned)


def _traffic(c: Context) -> float:
    """Queries in and out: keys come from the card's second cache."""
    return float(2 * extent(c, "rows") * extent(c, "hq") * extent(c, "d") * width(c))


def _operations(c: Context) -> float:
    return 4.0 * extent(c, "rows") * extent(c, "hq") * keys_of(c) * extent(c, "d")


IMPLS: tuple[Impl, ...] = (
    foreign(
        "attn_sparse",
        "attn_sparse.vendor_flash_mla:attn_sparse",
        library="flash_mla",
        phases=frozenset({Phase.CHUNK}),
        conditions=(
            ON_CUDA,
            capability((9, 0), (10, 9)),
            package("flash_mla"),
            one_of("d", (512,)),
            one_of("hq", (64, 128)),
        ),
        requires_layout={"kv": "latent@1"},
        honours=frozenset({"selected", "entries"}),
        native_when=(own_matrix_unit,),
        cost=in_turn(
            # As paired with ours on an H200 (record 2026-11-30-h200-vendors-adapters): 0.22 ms of
            # 2,048 rows, 0.53 of 8,192. Chosen once for every context, so by the longest, whose
            # entries leave the second cache: 1.54 ms where a short one takes 1.25.
            roofline(_prepared, launches=28, part=0.5),
            roofline(_traffic, _operations, part=0.8, compute_part=0.65),
        ),
        copies=joined,
    ),
)
