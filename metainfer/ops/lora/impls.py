"""Declared implementations of `lora`."""

from metainfer.core.step import Phase
from metainfer.core.verdict import ACCEPT, Verdict
from metainfer.kernels.conditions import custom
from metainfer.kernels.cost import Amount, extent, roofline, width
from metainfer.kernels.impl import Context, Numerics
from metainfer.ops.declare import ON_EITHER, own_matrix_unit, portable, reference


def _own_library(context: Context) -> Verdict:
    return ACCEPT if context.facts.device.kind == "cpu" else own_matrix_unit(context)


def _in_use(context: Context) -> int:
    """Adapters of a typical step: no more than its sequences."""
    return min(extent(context, "adapters"), extent(context, "seqs"))


def _low(context: Context) -> int:
    """Elements of one adapter's pairs."""
    k, n = extent(context, "k") * extent(context, "parts"), extent(context, "n")
    return extent(context, "rank") * (k + n)


def _traffic(adapters: Amount) -> Amount:
    """Pairs read once, rows in, low-rank rows, and y read and written."""

    def amount(context: Context) -> float:
        each = extent(context, "k") + 3 * extent(context, "n")
        low = 3 * adapters(context) * extent(context, "parts") * extent(context, "rank")
        moved = adapters(context) * _low(context) + extent(context, "rows") * (each + low)
        return moved * width(context)

    return amount


def _operations(adapters: Amount) -> Amount:
    return lambda c: 2.0 * extent(c, "rows") * adapters(c) * _low(c)


def _all(context: Context) -> float:
    return float(extent(context, "adapters"))


_HOST_KNOWS = custom(
    "graph",
    lambda c: c.facts.device.kind == "cpu" or c.request.phase is not Phase.DECODE,
    "sorts rows by adapter on the host, and decode steps are captured with their rows on the card",
)

# Seeds: launches are those of the products and selections, nothing was measured.
_masked = roofline(_traffic(_all), _operations(_all), launches=7, part=0.5, compute_part=0.5)


def _grouped(context: Context) -> float | None:
    used, parts = _in_use(context), extent(context, "parts")
    launches = used * (3 + 3 * parts)
    one = roofline(
        _traffic(lambda c: float(used)),
        _operations(lambda c: 1.0),
        launches=launches,
        part=0.5,
        compute_part=0.5,
    )
    return one(context)


IMPLS = (
    portable(
        "lora",
        "lora.torch_lora:lora",
        native_when=(_own_library,),
        numerics=Numerics.NATIVE,
        cost=_masked,
    ),
    portable(
        "lora",
        "lora.torch_lora:lora_grouped",
        name="grouped",
        conditions=(ON_EITHER, _HOST_KNOWS),
        native_when=(_own_library,),
        numerics=Numerics.NATIVE,
        graph_safe=False,
        cost=_grouped,
    ),
    reference(
        "lora",
        "lora.ref:lora",
        cost=roofline(_traffic(_all), _operations(_all), launches=64, part=0.1, element="float32"),
    ),
)
