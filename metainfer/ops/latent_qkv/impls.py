"""Declared implementations of `latent_qkv`, and the layouts of latents."""

from collections.abc import Callable

from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context, Layout
from metainfer.ops.declare_entries import LATENTS, moved, torch_and_reference, torch_static
from metainfer.ops.latent_qkv import impls_triton

LAYOUTS = (
    # Pages [P, entries, width] in the model's type.
    Layout(id="latent@1", role="kv"),
    # e4m3 with a scale byte per group, the rotated tail in bfloat16 (`kv.book.form.latent_fp8`).
    Layout(id="latent-fp8@1", role="kv"),
)


def _cost(
    passes: float, launches: int, part: float
) -> Callable[[str], Callable[[Context], float | None]]:
    """`passes` over the queries, in and out, and the latents written."""

    def made(layout: str) -> Callable[[Context], float | None]:
        def traffic(c: Context) -> float:
            rows, d = extent(c, "rows"), extent(c, "d")
            queries = 2.0 * rows * extent(c, "hq") * d * max(width(c), 4)
            return passes * queries + moved(layout, rows, c)

        return roofline(traffic, launches=launches, part=part)

    return made


NORM_Q = frozenset({"norm_q"})

IMPLS = (
    *impls_triton.IMPLS,
    *torch_and_reference(
        "latent_qkv",
        "kv",
        LATENTS,
        ("latent_qkv.torch_latent:latent_qkv", "latent_qkv.ref:latent_qkv"),
        (_cost(3, 24, 0.4), _cost(6, 30, 0.3)),
        NORM_Q,
    ),
    *torch_static(
        "latent_qkv",
        "kv",
        LATENTS,
        "latent_qkv.torch_static:latent_qkv",
        _cost(3, 36, 0.4),
        NORM_Q,
    ),
)
