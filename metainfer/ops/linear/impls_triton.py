"""Declared Triton implementations of `linear` on FP8 weights as stored."""

from metainfer.core.verdict import Verdict
from metainfer.kernels.conditions import (
    capability,
    dot_type,
    multiple_of,
    package,
    shared_memory,
    weight_schemes,
)
from metainfer.kernels.cost import extent, linear_operations, linear_traffic, roofline
from metainfer.kernels.impl import Context, Numerics
from metainfer.ops.declare import HALVES, ON_CUDA, STORED, triton
from metainfer.ops.linear.tiles import BLOCK, STREAM_ROWS, chunk_for, stream_for

E4M3 = "float8_e4m3fn"


def _fits(context: Context) -> Verdict:
    """Both forms' tiles fit the card's shared memory."""
    card = context.facts.device.capability
    streamed = max(stream_for(card, rows).shared_bytes(rows) for rows in (16, STREAM_ROWS))
    return shared_memory(max(streamed, chunk_for(card).shared_bytes()))(context)


def _cost(context: Context) -> float | None:
    """One launch for few rows; more are quantised first. Parts as measured on an H200."""
    few = extent(context, "rows") <= STREAM_ROWS
    cost = roofline(
        linear_traffic(1.0),
        linear_operations,
        launches=1 if few else 2,
        part=0.7,
        compute_part=0.63,
        element=E4M3,
    )
    return cost(context)


IMPLS = (
    triton(
        "linear",
        "linear.fp8:linear",
        dtypes=HALVES,
        conditions=(
            ON_CUDA,
            capability((8, 9)),
            package("triton", (3, 6)),
            dot_type(E4M3),
            weight_schemes("fp8_128", "fp8_128_f32"),
            multiple_of("k", BLOCK),
            multiple_of("n", BLOCK),
            _fits,
        ),
        requires_layout=STORED,
        native_when=(dot_type(E4M3),),
        numerics=Numerics.NATIVE,
        cost=_cost,
    ),
)
