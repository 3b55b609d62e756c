"""Declared implementations of `moe_experts`, and the layouts of packed experts."""

from collections.abc import Callable

from metainfer.kernels.conditions import weight_schemes
from metainfer.kernels.cost import extent, roofline, width
from metainfer.kernels.impl import Context, Layout, Numerics
from metainfer.ops.declare import BLOCK_SCALED, ON_EITHER, PLAIN, portable, reference
from metainfer.ops.linear.impls import stored_bytes
from metainfer.ops.moe_experts.impls_cuda import IMPLS as CUDA_IMPLS
from metainfer.ops.moe_experts.impls_triton import IMPLS as TRITON_IMPLS

CLAMP = frozenset({"clamp"})
DENSE = {"experts": "experts-dense@1"}
STORED = {"experts": "experts-stored@1"}

LAYOUTS = (
    Layout(
        id="experts-dense@1",
        role="experts",
        pack="metainfer.ops.moe_experts.layouts:pack_dense",
        schemes=PLAIN | BLOCK_SCALED,
    ),
    Layout(
        id="experts-stored@1",
        role="experts",
        pack="metainfer.ops.moe_experts.layouts:pack_stored",
        schemes=BLOCK_SCALED,
        nbytes=stored_bytes,
    ),
)


def _matrices(c: Context) -> int:
    """Experts read: all of them, or as many as the rows can choose."""
    return min(extent(c, "e"), extent(c, "rows") * extent(c, "top_k"))


def _traffic(each: Callable[[Context], float]) -> Callable[[Context], float]:
    """The experts read, at so many bytes of an element, and the rows of every choice."""

    def amount(c: Context) -> float:
        d, f = extent(c, "d"), extent(c, "f")
        rows = extent(c, "rows") * extent(c, "top_k") * (2 * d + 3 * f)
        return float(_matrices(c) * 3 * d * f * each(c) + rows * 4)

    return amount


def _operations(c: Context) -> float:
    return 6.0 * extent(c, "rows") * extent(c, "top_k") * extent(c, "d") * extent(c, "f")


def _library(c: Context) -> float | None:
    """About ten launches for each expert touched."""
    launches = 10 + 10 * _matrices(c)
    cost = roofline(_traffic(width), _operations, launches=launches, part=0.5, compute_part=0.45)
    return cost(c)


def _every_expert(c: Context) -> float | None:
    """All experts on all rows, eight launches each."""
    rows, d, f, e = (extent(c, name) for name in ("rows", "d", "f", "e"))

    def traffic(c: Context) -> float:
        return float(e * (3 * d * f * width(c) + rows * (2 * d + 3 * f) * 4))

    cost = roofline(
        traffic, lambda c: 6.0 * rows * e * d * f, launches=8 * e, part=0.5, compute_part=0.45
    )
    return cost(c)


def _recipe(c: Context) -> float | None:
    """Every expert touched is widened at every call (seed: 20 bytes of an element move)."""
    launches = 40 + 60 * _matrices(c)
    cost = roofline(
        _traffic(lambda _: 20.0), _operations, launches=launches, part=0.6, element="float32"
    )
    return cost(c)


IMPLS = (
    *TRITON_IMPLS,
    *CUDA_IMPLS,
    portable(
        "moe_experts",
        "moe_experts.torch_experts:dense",
        requires_layout=DENSE,
        honours=CLAMP,
        numerics=Numerics.NATIVE,
        graph_safe=False,  # the host asks which experts were chosen
        cost=_library,
    ),
    portable(
        "moe_experts",
        "moe_experts.torch_experts:static",
        name="torch-static",
        requires_layout=DENSE,
        honours=CLAMP,
        numerics=Numerics.NATIVE,
        cost=_every_expert,
    ),
    portable(
        "moe_experts",
        "moe_experts.torch_experts:recipe",
        name="recipe",
        conditions=(ON_EITHER, weight_schemes(*sorted(BLOCK_SCALED))),
        requires_layout=STORED,
        honours=CLAMP,
        numerics=Numerics.NATIVE,
        graph_safe=False,
        cost=_recipe,
        rounds="moe_experts.torch_experts:rounded",
    ),
    reference(
        "moe_experts",
        "moe_experts.ref:moe_experts",
        requires_layout=DENSE,
        honours=CLAMP,
        cost=roofline(
            _traffic(lambda c: width(c) + 8.0),
            _operations,
            launches=256,
            part=0.3,
            element="float32",
        ),
    ),
)
