"""Declared implementations of `linear`, and the layouts of packed weights."""

from metainfer.core.verdict import ACCEPT, Verdict
from metainfer.formats.blocks import FORMATS
from metainfer.formats.schemes import BLOCKS
from metainfer.kernels.conditions import package, weight_schemes
from metainfer.kernels.cost import linear_operations, linear_traffic, roofline, width
from metainfer.kernels.impl import Context, Impl, Layout, Numerics
from metainfer.ops.declare import (
    C_ON_CPU,
    DENSE,
    FLOAT32,
    FLOATS,
    NATIVE_ON_CPU,
    ON_CPU,
    ON_EITHER,
    PLAIN,
    own_matrix_unit,
)

BIAS = frozenset({"bias"})
BLOCKED = frozenset({"Q8_0", "Q4_0", "Q4_1"})
DECODED = BLOCKED | PLAIN | frozenset(FORMATS)


def _own_library(context: Context) -> Verdict:
    """The vendor library runs on the device's own instructions for the type."""
    return ACCEPT if context.facts.device.kind == "cpu" else own_matrix_unit(context)


def _stored(scheme: str) -> float:
    """Bytes of one element in the checkpoint's own blocks."""
    elements, size = BLOCKS[scheme]
    return size / elements


LAYOUTS = (
    Layout(
        id="dense@1",
        role="weight",
        pack="metainfer.ops.linear.packed:pack_dense",
        schemes=DECODED,
    ),
    Layout(
        id="onednn-f32@1",
        role="weight",
        pack="metainfer.ops.linear.onednn_layout:pack",
        schemes=DECODED,
        conditions=(ON_CPU,),
        embed_apart=True,
    ),
    Layout(
        id="c-rows16@1",
        role="weight",
        pack="metainfer.ops.linear.cpu_c:pack",
        schemes=BLOCKED,
        conditions=C_ON_CPU,
        element_bytes=_stored,
    ),
)


def _library(context: Context) -> float | None:
    """cuBLAS near its roofline; F.linear on CPU reorders the weight at every call."""
    parts = (0.5, 0.45) if context.facts.device.kind == "cpu" else (0.75, 0.75)
    cost = roofline(linear_traffic(), linear_operations, part=parts[0], compute_part=parts[1])
    return cost(context)


def _stored_traffic(context: Context) -> float:
    """Weights at the size they have in the checkpoint."""
    sizes = [BLOCKS[s][1] / BLOCKS[s][0] for s in context.request.schemes if s in BLOCKS]
    return linear_traffic(sum(sizes) / len(sizes) if sizes else 4.0)(context)


#: Half types are widened first: the weights move three times, twice as wide.
_widened = roofline(
    lambda c: linear_traffic()(c) * (1 if width(c) >= 4 else 5),
    linear_operations,
    launches=3,
    part=0.6,
    element="float32",
)

# Seeds, from two-core measurements of a 135M model: F.linear reaches a bit over half of what
# oneDNN's prepacked weights do; streaming 4-bit blocks wins by its bytes, not by its arithmetic.
IMPLS = (
    Impl(
        op="linear",
        name="c",
        load="metainfer.ops.linear.cpu_c:linear",
        provider="c",
        dtypes=FLOAT32,
        conditions=(*C_ON_CPU, weight_schemes(*sorted(BLOCKED))),
        requires_layout={"weight": "c-rows16@1"},
        honours=BIAS,
        native_when=NATIVE_ON_CPU,
        cost=roofline(_stored_traffic, linear_operations, part=0.9, compute_part=0.8),
    ),
    Impl(
        op="linear",
        name="onednn",
        load="metainfer.ops.linear.cpu_onednn:linear",
        provider="torch",
        dtypes=FLOAT32,
        conditions=(ON_CPU, package("torch")),
        requires_layout={"weight": "onednn-f32@1"},
        honours=BIAS,
        native_when=NATIVE_ON_CPU,
        numerics=Numerics.NATIVE,
        cost=roofline(linear_traffic(), linear_operations, part=0.8, compute_part=0.8),
    ),
    Impl(
        op="linear",
        name="torch",
        load="metainfer.ops.linear.torch_dense:linear",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        requires_layout=DENSE,
        honours=BIAS,
        native_when=(_own_library,),
        numerics=Numerics.NATIVE,
        graph_safe=True,
        cost=_library,
    ),
    Impl(
        op="linear",
        name="ref",
        load="metainfer.ops.linear.ref:linear",
        provider="reference",
        dtypes=FLOATS,
        requires_layout=DENSE,
        honours=BIAS,
        cost=_widened,
    ),
    Impl(
        op="linear_f32",
        name="ref",
        load="metainfer.ops.linear.ref:linear_f32",
        provider="reference",
        dtypes=FLOATS,
        requires_layout=DENSE,
        honours=BIAS,
        cost=_widened,
    ),
)
