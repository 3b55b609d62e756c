"""Declared implementations of `rope`."""

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

HONOURS = frozenset({"interleaved", "partial"})


def _values(c: Context) -> float:
    return 2.0 * extent(c, "rows") * (extent(c, "hq") + extent(c, "hkv")) * extent(c, "d")


IMPLS = (
    Impl(
        op="rope",
        name="triton",
        load="metainfer.ops.rope.triton:rope",
        provider="triton",
        dtypes=SHORT,
        conditions=TRITON,
        honours=HONOURS,
        native_when=(ON_CUDA,),
        graph_safe=True,
        cost=elementwise(_values, part=0.7),
    ),
    Impl(
        op="rope",
        name="c",
        load="metainfer.ops.rope.cpu_c:rope",
        provider="c",
        dtypes=FLOAT32,
        conditions=C_ON_CPU,
        honours=HONOURS,
        native_when=NATIVE_ON_CPU,
        cost=elementwise(_values, part=0.8),
    ),
    Impl(
        op="rope",
        name="torch",
        load="metainfer.ops.rope.torch_rope:rope",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        honours=HONOURS,
        native_when=NATIVE_ON_CPU,
        graph_safe=True,
        cost=elementwise(_values, launches=16, part=0.25),
    ),
    Impl(
        op="rope",
        name="ref",
        load="metainfer.ops.rope.ref:rope",
        provider="reference",
        dtypes=FLOATS,
        honours=HONOURS,
        graph_safe=True,
        cost=elementwise(_values, launches=24, part=0.15),
    ),
)
