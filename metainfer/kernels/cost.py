"""Predicted seconds of one call, from bytes, operations and launches. No torch.

``launches * launch_s + max(bytes / (bandwidth * part), flops / (rate * part))``. Bandwidth and rate
come from the facts; an unknown fact gives no estimate (None), never a guess. The `part` of the
peak that an implementation reaches and the launch time are **seeds**: they rank candidates until
this machine has a record (`Policy.measured`), and they are not to be quoted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from metainfer.kernels.impl import Context

BYTES: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
)

#: Seconds from one eager call to the next, host side included (seed).
LAUNCH_S: Mapping[str, float] = MappingProxyType({"cpu": 3e-6, "cuda": 5e-6})

Amount = Callable[[Context], float]


def width(context: Context) -> int:
    """Bytes of one activation element; 4 for a dtype not listed."""
    return BYTES.get(context.request.dtype, 4)


def extent(context: Context, name: str, default: int = 1) -> int:
    """A named extent of the request's shape."""
    return context.request.shape.get(name, default)


def roofline(
    traffic: Amount,
    operations: Amount | None = None,
    *,
    launches: int = 1,
    part: float = 1.0,
    compute_part: float = 0.7,
    element: str = "",
) -> Callable[[Context], float | None]:
    """A cost function. `traffic` in bytes, `operations` in FLOP; `element` overrides the dtype
    whose matrix rate counts. Where no matrix rate is known the memory term stands alone."""

    def seconds(context: Context) -> float | None:
        device = context.facts.device
        bandwidth = device.read_bytes_s
        if bandwidth is None and device.kind == "cpu":
            bandwidth = context.facts.host.read_bytes_s
        if not bandwidth:
            return None
        memory = traffic(context) / (bandwidth * part)
        rate = _rate(device.dot_flops, element or context.request.dtype)
        work = operations(context) / (rate * compute_part) if operations and rate else 0.0
        return launches * LAUNCH_S.get(device.kind, 5e-6) + max(memory, work)

    return seconds


def in_turn(*steps: Callable[[Context], float | None]) -> Callable[[Context], float | None]:
    """The cost of steps of which each waits for the one before, as a matrix that is decoded and
    then multiplied: `roofline` of both together would hide the smaller one. None where one is."""

    def seconds(context: Context) -> float | None:
        each = [step(context) for step in steps]
        return None if None in each else sum(s for s in each if s is not None)

    return seconds


WIDE_SHARE = 1 / 12
"""Rate of float32 beside the slowest known matrix type, where a card's own is not (seed)."""


def _rate(rates: Mapping[str, float], element: str) -> float | None:
    """FLOP/s of an element type. A card that names its matrix rates has none for the wide types:
    leaving their work out would make a float32 path look free beside the card's own."""
    if element in rates or not rates:
        return rates.get(element)
    return min(rates.values()) * WIDE_SHARE


def elementwise(
    values: Amount, *, launches: int = 1, part: float = 1.0
) -> Callable[[Context], float | None]:
    """The cost of moving `values` activation elements (reads and writes together)."""
    return roofline(lambda c: values(c) * width(c), launches=launches, part=part)


def linear_operations(context: Context) -> float:
    """``2 * rows * N * K``."""
    return 2.0 * extent(context, "rows") * extent(context, "n") * extent(context, "k")


def linear_traffic(element_bytes: float | None = None) -> Amount:
    """Weights once, activations in and out; `element_bytes` of a weight (default: the dtype's)."""

    def amount(context: Context) -> float:
        n, k, rows = (extent(context, name) for name in ("n", "k", "rows"))
        each = width(context) if element_bytes is None else element_bytes
        return n * k * each + rows * (n + k) * width(context)

    return amount


def attention_traffic(copies: int = 1) -> Amount:
    """Keys and values of every sequence, moved `copies` times, and the queries in and out."""

    def amount(context: Context) -> float:
        d, hq, hkv = (extent(context, name) for name in ("d", "hq", "hkv"))
        cached = extent(context, "seqs") * _span(context) * hkv * d * 2
        return (cached * copies + 2 * extent(context, "rows") * hq * d) * width(context)

    return amount


def attention_operations(context: Context) -> float:
    """``4 * rows * span * Hq * D``: scores and mix, without the saving of the causal half."""
    heads = extent(context, "hq") * extent(context, "d")
    return 4.0 * extent(context, "rows") * _span(context) * heads


def _span(context: Context) -> int:
    """Keys that one query sees: the context, or the window if smaller."""
    context_tokens = extent(context, "context", 1024)
    window = extent(context, "window", 0)
    return min(context_tokens, window) if window else context_tokens
