"""Declared implementations of `attn_paged`."""

from metainfer.kernels.cost import attention_operations, attention_traffic, roofline
from metainfer.kernels.impl import Impl
from metainfer.ops.declare import FLOATS, NATIVE_ON_CPU, ON_EITHER

PAGES = {"kv": "kv-pages@1"}
WINDOW = frozenset({"window"})

IMPLS = (
    Impl(
        op="attn_paged",
        name="torch",
        load="metainfer.ops.attn_paged.torch_sdpa:attn_paged",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        requires_layout=PAGES,
        honours=WINDOW,
        native_when=NATIVE_ON_CPU,
        cost=roofline(attention_traffic(3), attention_operations, launches=12, part=0.5),
    ),
    Impl(
        op="attn_paged",
        name="ref",
        load="metainfer.ops.attn_paged.ref:attn_paged",
        provider="reference",
        dtypes=FLOATS,
        requires_layout=PAGES,
        honours=WINDOW,
        cost=roofline(
            attention_traffic(12), attention_operations, launches=30, part=0.3, element="float32"
        ),
    ),
)
