"""Declared implementations of `latent_qkv`, and the layouts of latents."""

from collections.abc import Callable

from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context, Impl, Layout
from metainfer.ops.declare import FLOATS, NATIVE_ON_CPU, ON_EITHER
from metainfer.ops.declare_entries import LATENTS, moved, per_layout

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


IMPLS = (
    *per_layout(
        "kv",
        LATENTS,
        _cost(3, 24, 0.4),
        Impl(
            op="latent_qkv",
            name="torch",
            load="metainfer.ops.latent_qkv.torch_latent:latent_qkv",
            provider="torch",
            dtypes=FLOATS,
            conditions=(ON_EITHER,),
            honours=frozenset({"norm_q"}),
            native_when=NATIVE_ON_CPU,
        ),
    ),
    *per_layout(
        "kv",
        LATENTS,
        _cost(6, 30, 0.3),
        Impl(
            op="latent_qkv",
            name="ref",
            load="metainfer.ops.latent_qkv.ref:latent_qkv",
            provider="reference",
            dtypes=FLOATS,
            honours=frozenset({"norm_q"}),
        ),
    ),
)
