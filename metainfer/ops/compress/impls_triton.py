"""Declared Triton implementations of the compressors, one per form of what they write."""

from collections.abc import Callable
from dataclasses import replace

from metainfer.core.verdict import ACCEPT, Verdict
from metainfer.kernels.conditions import at_most, custom, multiple_of
from metainfer.kernels.cost import extent, roofline
from metainfer.kernels.impl import Context
from metainfer.ops.compress.tiles import MAX_WIDTH
from metainfer.ops.declare import TRITON, triton
from metainfer.ops.declare_entries import KEYS, LATENTS, PLAIN, entry_bytes, per_layout


def _cost(layout: str) -> Callable[[Context], float | None]:
    """Values and gates once, what stays in the ring, the entries; a window that closes in a decode
    step is read from the ring (seed)."""

    def traffic(c: Context) -> float:
        rows, ratio = extent(c, "rows"), extent(c, "ratio", 4)
        wide = 2 if "overlap" in c.request.semantics else 1
        raw = 8.0 * rows * wide * extent(c, "d")
        return 3 * raw + rows / ratio * entry_bytes(layout, c)

    return roofline(traffic, part=0.5)


def _mixes(c: Context) -> Verdict:
    """Forms that are mixed by the Hadamard matrix have a power of two of channels."""
    if c.layouts.get("index") in PLAIN:
        return ACCEPT
    whole = custom("shape", lambda c: _power(extent(c, "d")), "index keys are 2^n channels wide")
    return whole(c)


def _power(d: int) -> bool:
    return d >= 2 and d & (d - 1) == 0


_BASE = triton(
    "compress",
    "compress.triton:compress",
    # Channels turn in pairs; a program holds an entry whole.
    conditions=(*TRITON, multiple_of("d", 2), multiple_of("rotated", 2), at_most("d", MAX_WIDTH)),
    honours=frozenset({"overlap"}),
)
_KEYS = replace(_BASE, op="compress_index", conditions=(*_BASE.conditions, _mixes))

IMPLS = (*per_layout("kv", LATENTS, _cost, _BASE), *per_layout("index", KEYS, _cost, _KEYS))
