"""Declared Triton implementations of `latent_qkv`, one per form of the latents."""

from collections.abc import Callable

from metainfer.kernels.conditions import at_most, multiple_of
from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context
from metainfer.ops.declare import TRITON, triton
from metainfer.ops.declare_entries import LATENTS, entry_bytes, per_layout


def _cost(layout: str) -> Callable[[Context], float | None]:
    """Queries in and out, latents in and stored (seed)."""

    def traffic(c: Context) -> float:
        channels = (2.0 * extent(c, "hq") + 1) * extent(c, "d")
        return extent(c, "rows") * (channels * width(c) + entry_bytes(layout, c))

    return roofline(traffic, part=0.8)


IMPLS = per_layout(
    "kv",
    LATENTS,
    _cost,
    triton(
        "latent_qkv",
        "latent_qkv.triton:latent_qkv",
        # Channels turn in pairs; a program holds one head whole.
        conditions=(*TRITON, multiple_of("d", 2), multiple_of("rotated", 2), at_most("d", 4096)),
        honours=frozenset({"norm_q"}),
    ),
)
