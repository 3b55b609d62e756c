"""Declared Triton implementations of `linear` on FP8 weights as stored."""

from dataclasses import asdict

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
from metainfer.kernels.impl import Context, Numerics, Setting
from metainfer.ops.declare import HALVES, ON_CUDA, STORED, triton
from metainfer.ops.linear.tiles import (
    BLOCK,
    STREAM_ROWS,
    ChunkTile,
    StreamTile,
    chunk_for,
    stream_for,
)

E4M3 = "float8_e4m3fn"


def _fits(context: Context) -> Verdict:
    """Both forms' tiles fit the card's shared memory."""
    card = context.facts.device.capability
    streamed = max(stream_for(card, rows).shared_bytes(rows) for rows in (16, STREAM_ROWS))
    return shared_memory(max(streamed, chunk_for(card).shared_bytes()))(context)


def _stream_tiles(capability: tuple[int, int] | None, rows: int) -> tuple[StreamTile, ...]:
    """Tiles to try, the card's own first."""
    tried = (StreamTile(n, w, s) for n in (32, 64, 128) for w in (4, 8) for s in (3, 4, 5))
    return tuple(dict.fromkeys((stream_for(capability, rows), *tried)))


def _chunk_tiles(capability: tuple[int, int] | None) -> tuple[ChunkTile, ...]:
    """As `_stream_tiles`. The bulk copy engine is tried where there is one."""
    bulk = (False, True) if capability is not None and capability >= (9, 0) else (False,)
    sides = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (128, 256, 8))
    tried = (
        ChunkTile(m, n, warps, stages, tma=tma, group=group)
        for m, n, warps in sides
        for stages in (2, 3, 4)
        for tma in bulk
        for group in (8, 32)
    )
    return tuple(dict.fromkeys((chunk_for(capability), *tried)))


def _settings(context: Context) -> tuple[Setting, ...]:
    """Tiles of the form that the request's rows take."""
    card, rows = context.facts.device.capability, extent(context, "rows")
    if rows <= STREAM_ROWS:
        return tuple(
            Setting({"stream_tile": asdict(tile)}, tile.shared_bytes(rows))
            for tile in _stream_tiles(card, rows)
        )
    return tuple(
        Setting({"chunk_tile": asdict(tile)}, tile.shared_bytes()) for tile in _chunk_tiles(card)
    )


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
        settings=_settings,
    ),
)
