"""Declared implementations of `linear`, and the layouts of packed weights."""

from metainfer.core.verdict import Verdict, require
from metainfer.kernels.cost import linear_operations, linear_traffic, roofline, width
from metainfer.kernels.impl import Context, Impl, Layout, Numerics
from metainfer.ops.declare import FLOATS, ON_EITHER

BIAS = frozenset({"bias"})
DENSE = {"weight": "dense@1"}
DECODED = frozenset({"F64", "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"})


def _own_matrix_unit(context: Context) -> Verdict:
    """The vendor library runs on the device's own instructions for the type."""
    device, dtype = context.facts.device, context.request.dtype
    types = device.dot_types or frozenset()
    return require(
        device.kind == "cpu" or dtype in types or dtype == "float32",
        "dot-type",
        f"no native {dtype} matrix instruction on {device.name}",
    )


LAYOUTS = (
    Layout(
        id="dense@1",
        role="weight",
        pack="metainfer.ops.linear.packed:pack_dense",
        schemes=DECODED,
    ),
)

IMPLS = (
    Impl(
        op="linear",
        name="torch",
        load="metainfer.ops.linear.torch_dense:linear",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        requires_layout=DENSE,
        honours=BIAS,
        native_when=(_own_matrix_unit,),
        numerics=Numerics.NATIVE,
        graph_safe=True,
        cost=roofline(linear_traffic(), linear_operations, part=0.6),
    ),
    Impl(
        op="linear",
        name="ref",
        load="metainfer.ops.linear.ref:linear",
        provider="reference",
        dtypes=FLOATS,
        requires_layout=DENSE,
        honours=BIAS,
        # Half types are widened first: the weights move three times, twice as wide.
        cost=roofline(
            lambda c: linear_traffic()(c) * (1 if width(c) >= 4 else 5),
            linear_operations,
            launches=3,
            part=0.6,
            element="float32",
        ),
    ),
)
