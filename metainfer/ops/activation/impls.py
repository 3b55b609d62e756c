"""Declared implementations of `swiglu` and `swiglu_clamp`."""

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import (
    C_ON_CPU,
    FLOAT32,
    FLOATS,
    NATIVE_ON_CPU,
    ON_CUDA,
    ON_EITHER,
    SHORT,
    TRITON,
)


def _values(c: Context) -> float:
    return 3.0 * extent(c, "rows") * extent(c, "f")


IMPLS = (
    Impl(
        op="swiglu",
        name="triton",
        load="metainfer.ops.activation.triton:swiglu",
        provider="triton",
        dtypes=SHORT,
        conditions=TRITON,
        native_when=(ON_CUDA,),
        graph_safe=True,
        cost=elementwise(_values, part=0.8),
    ),
    Impl(
        op="swiglu",
        name="c",
        load="metainfer.ops.activation.cpu_c:swiglu",
        provider="c",
        dtypes=FLOAT32,
        conditions=C_ON_CPU,
        native_when=NATIVE_ON_CPU,
        cost=elementwise(_values, part=0.8),
    ),
    Impl(
        op="swiglu",
        name="torch",
        load="metainfer.ops.activation.torch_swiglu:swiglu",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        native_when=NATIVE_ON_CPU,
        graph_safe=True,
        cost=elementwise(_values, launches=2, part=0.5),
    ),
    Impl(
        op="swiglu",
        name="ref",
        load="metainfer.ops.activation.ref:swiglu",
        provider="reference",
        dtypes=FLOATS,
        graph_safe=True,
        cost=elementwise(_values, launches=5, part=0.2),
    ),
    Impl(
        op="swiglu_clamp",
        name="torch",
        load="metainfer.ops.activation.torch_swiglu:swiglu_clamp",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        native_when=NATIVE_ON_CPU,
        graph_safe=True,
        cost=elementwise(_values, launches=4, part=0.4),
    ),
    Impl(
        op="swiglu_clamp",
        name="ref",
        load="metainfer.ops.activation.ref:swiglu_clamp",
        provider="reference",
        dtypes=FLOATS,
        graph_safe=True,
        cost=elementwise(_values, launches=7, part=0.2),
    ),
)
