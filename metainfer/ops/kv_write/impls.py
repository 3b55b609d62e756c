"""Declared implementations of `kv_write`, and the layout of dense cache pages."""

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context, Impl, Layout
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

PAGES = {"kv": "kv-pages@1"}


def _values(c: Context) -> float:
    return 4.0 * extent(c, "rows") * extent(c, "hkv") * extent(c, "d")


LAYOUTS = (
    # Two tensors [P, G, Hkv, D] in the model's dtype.
    Layout(id="kv-pages@1", role="kv"),
)

IMPLS = (
    Impl(
        op="kv_write",
        name="triton",
        load="metainfer.ops.kv_write.triton:kv_write",
        provider="triton",
        dtypes=SHORT,
        conditions=TRITON,
        requires_layout=PAGES,
        native_when=(ON_CUDA,),
        graph_safe=True,
        cost=elementwise(_values, part=0.7),
    ),
    Impl(
        op="kv_write",
        name="c",
        load="metainfer.ops.kv_write.cpu_c:kv_write",
        provider="c",
        dtypes=FLOAT32,
        conditions=C_ON_CPU,
        requires_layout=PAGES,
        native_when=NATIVE_ON_CPU,
        cost=elementwise(_values, part=0.8),
    ),
    Impl(
        op="kv_write",
        name="torch",
        load="metainfer.ops.kv_write.torch_copy:kv_write",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        requires_layout=PAGES,
        native_when=NATIVE_ON_CPU,
        cost=elementwise(_values, launches=4, part=0.5),
    ),
    Impl(
        op="kv_write",
        name="ref",
        load="metainfer.ops.kv_write.ref:kv_write",
        provider="reference",
        dtypes=FLOATS,
        requires_layout=PAGES,
        cost=elementwise(_values, launches=12, part=0.3),
    ),
)
