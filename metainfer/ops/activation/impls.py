"""Declared implementations of `swiglu` and `swiglu_clamp`."""

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context
from metainfer.ops.declare import compiled_c, portable, reference, thread_settings, triton


def _values(c: Context) -> float:
    return 3.0 * extent(c, "rows") * extent(c, "f")


IMPLS = (
    triton("swiglu", "activation.triton:swiglu", cost=elementwise(_values, part=0.8)),
    compiled_c(
        "swiglu",
        "activation.cpu_c:swiglu",
        settings=thread_settings,
        cost=elementwise(_values, part=0.8),
    ),
    portable(
        "swiglu",
        "activation.torch_swiglu:swiglu",
        cost=elementwise(_values, launches=2, part=0.5),
    ),
    reference(
        "swiglu",
        "activation.ref:swiglu",
        graph_safe=True,
        cost=elementwise(_values, launches=5, part=0.2),
    ),
    triton(
        "swiglu_clamp",
        "activation.triton:swiglu_clamp",
        cost=elementwise(_values, part=0.8),
    ),
    portable(
        "swiglu_clamp",
        "activation.torch_swiglu:swiglu_clamp",
        cost=elementwise(_values, launches=4, part=0.4),
    ),
    reference(
        "swiglu_clamp",
        "activation.ref:swiglu_clamp",
        graph_safe=True,
        cost=elementwise(_values, launches=7, part=0.2),
    ),
)
