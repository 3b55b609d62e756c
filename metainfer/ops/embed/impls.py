"""Declared implementations of `embed`."""

from metainfer.kernels.conditions import custom, weight_schemes
from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import (
    C_ON_CPU,
    FLOAT32,
    FLOATS,
    NATIVE_ON_CPU,
    ON_CPU,
    ON_CUDA,
    ON_EITHER,
    SHORT,
    TRITON,
)


def _values(c: Context) -> float:
    return 2.0 * extent(c, "rows") * extent(c, "d")


IMPLS = (
    Impl(
        op="embed",
        name="triton",
        load="metainfer.ops.embed.triton:embed",
        provider="triton",
        dtypes=SHORT,
        conditions=TRITON,
        requires_layout={"weight": "dense@1"},
        native_when=(ON_CUDA,),
        graph_safe=True,
        cost=elementwise(_values, part=0.7),
    ),
    Impl(
        op="embed",
        name="c",
        load="metainfer.ops.linear.cpu_c:embed",
        provider="c",
        dtypes=FLOAT32,
        conditions=(
            *C_ON_CPU,
            weight_schemes("Q4_0", "Q4_1", "Q8_0"),
            custom("shape", lambda c: len(set(c.request.schemes)) <= 1, "needs one scheme"),
        ),
        requires_layout={"weight": "c-rows16@1"},
        native_when=NATIVE_ON_CPU,
        cost=elementwise(_values, part=0.6),
    ),
    Impl(
        op="embed",
        name="onednn",
        load="metainfer.ops.linear.onednn_layout:embed",
        provider="torch",
        dtypes=FLOAT32,
        conditions=(ON_CPU,),
        requires_layout={"weight": "onednn-f32@1"},
        native_when=NATIVE_ON_CPU,
        cost=elementwise(_values, part=0.6),
    ),
    Impl(
        op="embed",
        name="torch",
        load="metainfer.ops.embed.torch_embed:embed",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        requires_layout={"weight": "dense@1"},
        native_when=NATIVE_ON_CPU,
        graph_safe=True,
        cost=elementwise(_values, part=0.6),
    ),
    Impl(
        op="embed",
        name="ref",
        load="metainfer.ops.embed.ref:embed",
        provider="reference",
        dtypes=FLOATS,
        requires_layout={"weight": "dense@1"},
        cost=elementwise(_values, launches=2, part=0.5),
    ),
)
