"""Declared implementations of `rope`."""

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context
from metainfer.ops.declare import compiled_c, portable, reference, triton

HONOURS = frozenset({"interleaved", "partial"})


def _values(c: Context) -> float:
    return 2.0 * extent(c, "rows") * (extent(c, "hq") + extent(c, "hkv")) * extent(c, "d")


IMPLS = (
    triton("rope", "rope.triton:rope", honours=HONOURS, cost=elementwise(_values, part=0.7)),
    compiled_c("rope", "rope.cpu_c:rope", honours=HONOURS, cost=elementwise(_values, part=0.8)),
    portable(
        "rope",
        "rope.torch_rope:rope",
        honours=HONOURS,
        cost=elementwise(_values, launches=16, part=0.25),
    ),
    reference(
        "rope",
        "rope.ref:rope",
        honours=HONOURS,
        graph_safe=True,
        cost=elementwise(_values, launches=24, part=0.15),
    ),
)
