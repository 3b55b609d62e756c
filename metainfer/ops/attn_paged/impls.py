"""Declared implementations of `attn_paged`."""

from metainfer.kernels.conditions import at_most, custom, multiple_of
from metainfer.kernels.cost import attention_operations, attention_traffic, roofline
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import C_ON_CPU, FLOAT32, FLOATS, NATIVE_ON_CPU, ON_EITHER

PAGES = {"kv": "kv-pages@1"}
WINDOW = frozenset({"window"})


def _group(context: Context) -> int:
    """Query heads per cache head; 0 when they do not divide."""
    hq, hkv = context.request.shape.get("hq", 0), context.request.shape.get("hkv", 0)
    return hq // hkv if hkv and hq % hkv == 0 else 0


IMPLS = (
    Impl(
        op="attn_paged",
        name="c",
        load="metainfer.ops.attn_paged.cpu_c:attn_paged",
        provider="c",
        dtypes=FLOAT32,
        conditions=(
            *C_ON_CPU,
            multiple_of("d", 16),
            at_most("d", 256),
            custom("shape", lambda c: 1 <= _group(c) <= 96, "Hq / Hkv must be whole, at most 96"),
        ),
        requires_layout=PAGES,
        honours=WINDOW,
        native_when=NATIVE_ON_CPU,
        cost=roofline(attention_traffic(), attention_operations, part=0.7, compute_part=0.5),
    ),
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
