"""Declared implementations of `rmsnorm` and `add_rmsnorm`."""

from metainfer.kernels.conditions import at_most
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
from metainfer.ops.norm.tiles import MAX_WIDTH


def _values(c: Context) -> float:
    return 2.0 * extent(c, "rows") * extent(c, "d")


def _values_add(c: Context) -> float:
    return 4.0 * extent(c, "rows") * extent(c, "d")


IMPLS = (
    Impl(
        op="rmsnorm",
        name="triton",
        load="metainfer.ops.norm.triton:rmsnorm",
        provider="triton",
        dtypes=SHORT,
        conditions=(*TRITON, at_most("d", MAX_WIDTH)),
        native_when=(ON_CUDA,),
        graph_safe=True,
        cost=elementwise(_values, part=0.8),
    ),
    Impl(
        op="add_rmsnorm",
        name="triton",
        load="metainfer.ops.norm.triton:add_rmsnorm",
        provider="triton",
        dtypes=SHORT,
        conditions=(*TRITON, at_most("d", MAX_WIDTH)),
        native_when=(ON_CUDA,),
        graph_safe=True,
        cost=elementwise(_values_add, part=0.8),
    ),
    Impl(
        op="rmsnorm",
        name="c",
        load="metainfer.ops.norm.cpu_c:rmsnorm",
        provider="c",
        dtypes=FLOAT32,
        conditions=C_ON_CPU,
        native_when=NATIVE_ON_CPU,
        cost=elementwise(_values, part=0.8),
    ),
    Impl(
        op="rmsnorm",
        name="torch",
        load="metainfer.ops.norm.torch_norm:rmsnorm",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        native_when=NATIVE_ON_CPU,
        graph_safe=True,
        cost=elementwise(_values, launches=2, part=0.4),
    ),
    Impl(
        op="rmsnorm",
        name="ref",
        load="metainfer.ops.norm.ref:rmsnorm",
        provider="reference",
        dtypes=FLOATS,
        graph_safe=True,
        cost=elementwise(_values, launches=8, part=0.12),
    ),
    Impl(
        op="add_rmsnorm",
        name="c",
        load="metainfer.ops.norm.cpu_c:add_rmsnorm",
        provider="c",
        dtypes=FLOAT32,
        conditions=C_ON_CPU,
        native_when=NATIVE_ON_CPU,
        cost=elementwise(_values_add, part=0.8),
    ),
    Impl(
        op="add_rmsnorm",
        name="torch",
        load="metainfer.ops.norm.torch_norm:add_rmsnorm",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        native_when=NATIVE_ON_CPU,
        graph_safe=True,
        cost=elementwise(_values_add, launches=3, part=0.5),
    ),
    Impl(
        op="add_rmsnorm",
        name="ref",
        load="metainfer.ops.norm.ref:add_rmsnorm",
        provider="reference",
        dtypes=FLOATS,
        graph_safe=True,
        cost=elementwise(_values_add, launches=11, part=0.15),
    ),
)
