"""Declared implementations of `kv_write`, and the layout of dense cache pages."""

from metainfer.kernels.cost import elementwise, extent
from metainfer.kernels.impl import Context, Layout
from metainfer.ops.declare import compiled_c, portable, reference, triton

PAGES = {"kv": "kv-pages@1"}


def _values(c: Context) -> float:
    return 4.0 * extent(c, "rows") * extent(c, "hkv") * extent(c, "d")


LAYOUTS = (
    # Two tensors [P, G, Hkv, D] in the model's dtype.
    Layout(id="kv-pages@1", role="kv"),
)

IMPLS = (
    triton(
        "kv_write",
        "kv_write.triton:kv_write",
        requires_layout=PAGES,
        cost=elementwise(_values, part=0.7),
    ),
    compiled_c(
        "kv_write",
        "kv_write.cpu_c:kv_write",
        requires_layout=PAGES,
        cost=elementwise(_values, part=0.8),
    ),
    portable(
        "kv_write",
        "kv_write.torch_copy:kv_write",
        requires_layout=PAGES,
        graph_safe=False,  # waits for the device
        cost=elementwise(_values, launches=4, part=0.5),
    ),
    reference(
        "kv_write",
        "kv_write.ref:kv_write",
        requires_layout=PAGES,
        cost=elementwise(_values, launches=12, part=0.3),
    ),
)
