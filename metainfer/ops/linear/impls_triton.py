"""Declared Triton implementations of `linear` on FP8 weights as stored."""

from collections.abc import Callable
from dataclasses import asdict, replace

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
from metainfer.kernels.impl import Context, Impl, Numerics, Setting
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


def _fits(wide: bool) -> Callable[[Context], Verdict]:
    """Both forms' tiles fit the card's shared memory."""

    def fits(context: Context) -> Verdict:
        card = context.facts.device.capability
        sizes = (stream_for(card, n).shared_bytes(n, wide) for n in (16, STREAM_ROWS))
        tile = chunk_for(card, wide)
        tiled = tile.wide_bytes(card) if wide else tile.shared_bytes()
        return shared_memory(max(*sizes, tiled))(context)

    return fits


def _stream_tiles(
    capability: tuple[int, int] | None, rows: int, size: int
) -> tuple[StreamTile, ...]:
    """Tiles to try, the card's own first."""
    tried = (StreamTile(n, w, s) for n in (32, 64, 128) for w in (4, 8) for s in (3, 4, 5))
    return tuple(dict.fromkeys((stream_for(capability, rows, size), *tried)))


def _chunk_tiles(
    capability: tuple[int, int] | None, wide: bool, rows: int
) -> tuple[ChunkTile, ...]:
    """As `_stream_tiles`. The bulk copy engine is tried where there is one."""
    hopper = capability is not None and capability >= (9, 0)
    bulk = (False, True) if hopper and not wide else (False,)
    sides = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (128, 256, 8))
    tried = (
        ChunkTile(m, n, warps, stages, tma=tma, group=group)
        for m, n, warps in sides
        for stages in (2, 3, 4)
        for tma in bulk
        for group in (8, 32)
    )
    return tuple(dict.fromkeys((chunk_for(capability, wide, rows), *tried)))


def _settings(wide: bool) -> Callable[[Context], tuple[Setting, ...]]:
    """Tiles of the form that the request's rows take."""

    def settings(context: Context) -> tuple[Setting, ...]:
        card, rows = context.facts.device.capability, extent(context, "rows")
        if rows <= STREAM_ROWS:
            size = extent(context, "n") * extent(context, "k")
            return tuple(
                Setting({"stream_tile": asdict(tile)}, tile.shared_bytes(rows, wide))
                for tile in _stream_tiles(card, rows, size)
            )
        return tuple(
            Setting(
                {"chunk_tile": asdict(tile)},
                tile.wide_bytes(card) if wide else tile.shared_bytes(),
            )
            for tile in _chunk_tiles(card, wide, rows)
        )

    return settings


def _cost(compute: float, element: str) -> Callable[[Context], float | None]:
    """One launch for few rows; more are quantised first. Parts as measured on an H200."""

    def seconds(context: Context) -> float | None:
        few = extent(context, "rows") <= STREAM_ROWS
        cost = roofline(
            linear_traffic(1.0),
            linear_operations,
            launches=1 if few else 2,
            part=0.7,
            compute_part=compute,
            element=element,
        )
        return cost(context)

    return seconds


_FORMAT = (
    package("triton", (3, 6)),
    weight_schemes("fp8_128", "fp8_128_f32"),
    multiple_of("k", BLOCK),
    multiple_of("n", BLOCK),
)

_EIGHT: Impl = triton(
    "linear",
    "linear.fp8:linear",
    dtypes=HALVES,
    conditions=(ON_CUDA, capability((8, 9)), dot_type(E4M3), *_FORMAT, _fits(wide=False)),
    requires_layout=STORED,
    native_when=(dot_type(E4M3),),
    numerics=Numerics.NATIVE,
    cost=_cost(0.63, E4M3),
    settings=_settings(wide=False),
)

IMPLS = (
    _EIGHT,
    replace(
        _EIGHT,
        name="triton-bf16",
        load="metainfer.ops.linear.fp8:linear_wide",
        dtypes=frozenset({"bfloat16"}),
        conditions=(ON_CUDA, capability((8, 0)), *_FORMAT, _fits(wide=True)),
        native_when=(),  # exact, and not the format's own instruction
        cost=_cost(0.4, "bfloat16"),
        settings=_settings(wide=True),
    ),
)
