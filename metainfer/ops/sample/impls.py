"""Declared implementations of `sample`."""

from metainfer.kernels.cost import extent, roofline
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import FLOATS, NATIVE_ON_CPU, ON_EITHER, SHORT, TRITON, triton


def _sorted(c: Context) -> float:
    """A full sort moves the row about a hundred times (seed)."""
    return 100.0 * extent(c, "rows") * extent(c, "v") * 4


def _partial(c: Context) -> float:
    return 20.0 * extent(c, "rows") * extent(c, "v") * 4


def _read(c: Context) -> float:
    """The row three times (seed: greedy rows are read once, draws twice, filtered ones three times
    and what top-k or top-p keeps once more)."""
    return 3.0 * 4.0 * extent(c, "rows") * extent(c, "v")


IMPLS = (
    triton(
        "sample",
        "sample.triton_calls:sample",
        dtypes=SHORT,
        conditions=TRITON,
        cost=roofline(_read, launches=5),
    ),
    Impl(
        op="sample",
        name="torch",
        load="metainfer.ops.sample.torch_partial:sample",
        provider="torch",
        dtypes=FLOATS,
        conditions=(ON_EITHER,),
        native_when=NATIVE_ON_CPU,
        cost=roofline(_partial, launches=20),
    ),
    Impl(
        op="sample",
        name="ref",
        load="metainfer.ops.sample.ref:sample",
        provider="reference",
        dtypes=FLOATS,
        cost=roofline(_sorted, launches=20),
    ),
)
