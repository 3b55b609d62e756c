"""Declared implementations of `out_group`."""

from collections.abc import Callable
from dataclasses import asdict, replace

from metainfer.core.verdict import Verdict
from metainfer.kernels.conditions import custom, multiple_of, shared_memory, weight_schemes
from metainfer.kernels.cost import extent, in_turn, roofline, width
from metainfer.kernels.impl import Context, Setting
from metainfer.ops.declare import (
    DENSE,
    FLOAT32,
    HALVES,
    ON_CPU,
    RECIPE,
    STORED,
    TRITON,
    own_matrix_unit,
    portable,
    reference,
    triton,
)
from metainfer.ops.linear.impls import stored_bytes
from metainfer.ops.out_group.tiles import BLOCK, FEW_ROWS, tile_for


def _traffic(each: Callable[[Context], float]) -> Callable[[Context], float]:
    """The matrices, `each` bytes an element, and the rows."""

    def amount(c: Context) -> float:
        heads, n = extent(c, "hq") * extent(c, "d"), extent(c, "n")
        rows = extent(c, "rows") * (heads + extent(c, "groups") * n)
        return _elements(c) * each(c) + rows * width(c)

    return amount


def _elements(c: Context) -> float:
    return float(extent(c, "hq") * extent(c, "d") * extent(c, "n"))


def _operations(c: Context) -> float:
    return 2.0 * extent(c, "rows") * _elements(c)


def _stored(c: Context) -> float:
    """Bytes of an element as the checkpoint holds it."""
    schemes = c.request.schemes or ("BF16",)
    return sum(stored_bytes(s, BLOCK, BLOCK) / BLOCK**2 for s in schemes) / len(schemes)


def _own(c: Context) -> float:
    return float(width(c))


_library = roofline(_traffic(_own), _operations, part=0.5, compute_part=0.45)
_streamed = roofline(_traffic(_stored), _operations, part=0.5, compute_part=0.5)
_decoded = in_turn(roofline(lambda c: _elements(c) * (_stored(c) + width(c)), part=0.7), _library)
_widened = in_turn(
    # seed: 16 more bytes of an element move; an H200 took 256 us for 33.5 M of them
    roofline(lambda c: _elements(c) * (_stored(c) + 16), launches=24, part=0.6),
    _library,
)


def _cost(c: Context) -> float | None:
    """Few tokens stream the weight; for many it is decoded first."""
    return (_streamed if extent(c, "rows") <= FEW_ROWS else _decoded)(c)


def _fits(c: Context) -> Verdict:
    card = c.facts.device.capability
    return shared_memory(max(tile_for(card, m).shared_bytes() for m in (16, 32, 64, 128)))(c)


def _settings(c: Context) -> tuple[Setting, ...]:
    """The card's own tile for as many tokens first; the matrix decoded has none."""
    rows = extent(c, "rows")
    if rows > FEW_ROWS:
        return ()
    own = tile_for(c.facts.device.capability, rows)
    tried = (
        replace(own, n=n, warps=warps, stages=stages, each=each)
        for n, warps in ((64, 4), (128, 8))
        for stages in (3, 4)
        for each in (1, 2, 4)
    )
    return tuple(
        Setting({"tile": asdict(tile)}, tile.shared_bytes())
        for tile in dict.fromkeys((own, *tried))
    )


def _in_blocks(c: Context) -> bool:
    return extent(c, "hq") * extent(c, "d") // extent(c, "groups") % BLOCK == 0


IMPLS = (
    triton(
        "out_group",
        "out_group.fp8:out_group",
        dtypes=HALVES,
        conditions=(
            *TRITON,
            weight_schemes("fp8_128", "fp8_128_f32"),
            multiple_of("n", BLOCK),
            custom("shape", _in_blocks, f"reads groups of whole blocks of {BLOCK} channels"),
            _fits,
        ),
        requires_layout=STORED,
        native_when=(own_matrix_unit,),
        cost=_cost,
        settings=_settings,
    ),
    portable(
        "out_group",
        "out_group.torch_group:out_group",
        requires_layout=DENSE,
        cost=_library,
    ),
    portable(
        "out_group",
        "out_group.torch_group:out_group_apart",
        name="onednn",
        dtypes=FLOAT32,
        conditions=(ON_CPU,),
        requires_layout={"weight": "onednn-f32@1"},
        graph_safe=False,
        cost=_library,
    ),
    portable(
        "out_group",
        "out_group.torch_group:out_group_stored",
        name="recipe",
        conditions=RECIPE,
        requires_layout=STORED,
        cost=_widened,
    ),
    reference(
        "out_group",
        "out_group.ref:out_group",
        requires_layout=DENSE,
        graph_safe=True,
        cost=roofline(
            _traffic(lambda c: width(c) + 8.0),
            _operations,
            launches=5,
            part=0.5,
            element="float32",
        ),
    ),
)
