"""Declared implementations of `embed`."""

from metainfer.kernels.conditions import custom, weight_schemes
from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context
from metainfer.ops.declare import (
    C_ON_CPU,
    DENSE,
    FLOAT32,
    ON_CPU,
    RECIPE,
    STORED,
    compiled_c,
    portable,
    reference,
    triton,
)


def _values(c: Context) -> float:
    return 2.0 * extent(c, "rows") * extent(c, "d")


IMPLS = (
    triton(
        "embed", "embed.triton:embed", requires_layout=DENSE, cost=elementwise(_values, part=0.7)
    ),
    compiled_c(
        "embed",
        "linear.cpu_c:embed",
        conditions=(
            *C_ON_CPU,
            weight_schemes("Q4_0", "Q4_1", "Q8_0"),
            custom("shape", lambda c: len(set(c.request.schemes)) <= 1, "needs one scheme"),
        ),
        requires_layout={"weight": "c-rows16@1"},
        cost=elementwise(_values, part=0.6),
    ),
    portable(
        "embed",
        "linear.onednn_layout:embed",
        name="onednn",
        dtypes=FLOAT32,
        conditions=(ON_CPU,),
        requires_layout={"weight": "onednn-f32@1"},
        graph_safe=False,
        cost=elementwise(_values, part=0.6),
    ),
    portable(
        "embed",
        "embed.torch_embed:embed",
        requires_layout=DENSE,
        cost=elementwise(_values, part=0.6),
    ),
    portable(
        "embed",
        "embed.torch_embed:embed_stored",
        name="recipe",
        conditions=RECIPE,
        requires_layout=STORED,
        cost=elementwise(_values, launches=6, part=0.3),
    ),
    reference(
        "embed",
        "embed.ref:embed",
        requires_layout=DENSE,
        cost=elementwise(_values, launches=2, part=0.5),
    ),
)
