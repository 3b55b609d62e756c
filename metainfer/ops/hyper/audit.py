"""Variants of the hyper-connection kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.hyper.tiles import (
    LONG,
    MIDDLE,
    MIX_LANES,
    SHORT,
    Tile,
    finish_warps,
    product_lanes,
)

MODULE = "metainfer.ops.hyper.triton"
N, D = 4, 4096


def _numbers(op: str) -> int:
    return N if op == "hyper_head" else (N + 2) * N


def _step(op: str, tile: Tile, rows: int) -> Variant:
    numbers = _numbers(op)
    sizes = {"NW": numbers, "NL": product_lanes(numbers), "M": tile.m, "BD": tile.d}
    streams: dict[str, str | int | bool]
    if tile is SHORT:
        kernel = "step_kernel"
        streams = {
            "streams": "*bf16", "y": "*bf16", "post": "*fp32", "comb": "*fp32", "mixed": "*bf16",
            "fn": "*fp32", "parts": "*fp32", "rows": "i32", "splits": "i32", "steps": "i32",
            "y_stride": "i32:16", "N": N, "D": D, **sizes, "MIX": op == "hyper_mix_pre",
            "ACROSS": tile.across, "EARLY": False,
        }  # fmt: skip
    else:
        kernel = "product_kernel"
        streams = {
            "streams": "*bf16", "fn": "*fp32", "parts": "*fp32", "rows": "i32", "steps": "i32",
            "K": N * D, **sizes, "DOWN": tile.down,
        }  # fmt: skip
    return Variant(
        impl=f"{op}/triton",
        name=f"{op.replace('_', '-')}-{rows}",
        kernel=f"{MODULE}_direct:{kernel}",
        args=streams,
        warps=tile.warps,
        shape={"rows": rows, "n": N, "d": D},
        mma="mma.sync",
        spill_bytes=16,
        why="two addresses wait beside the loop where that lets another program fit on a unit",
    )


def _finish(op: str, tile: Tile, rows: int) -> Variant:
    numbers = _numbers(op)
    args: dict[str, str | int | bool] = {
        "streams": "*bf16", "parts": "*fp32", "base": "*fp32", "scale": "*fp32",
        "weight": "*fp32", "x": "*bf16", "post": "*fp32", "comb": "*fp32", "rows": "i32",
        "splits": "i32", "norm_eps": "fp32", "eps": "fp32", "iters": "i32", "N": N, "D": D,
        "DL": D, "NW": numbers, "NL": product_lanes(numbers), "SPLITS": tile.splits,
        "B": tile.batch, "HEAD": op == "hyper_head", "EARLY": False,
    }  # fmt: skip
    return Variant(
        impl=f"{op}/triton",
        name=f"{op.replace('_', '-')}-finish-{rows}",
        kernel=f"{MODULE}:finish_kernel",
        args=args,
        warps=finish_warps(D),
        shape={"rows": rows, "n": N, "d": D},
    )


_MIX = Variant(
    impl="hyper_mix/triton",
    name="hyper-mix",
    kernel=f"{MODULE}:mix_kernel",
    args={
        "streams": "*bf16", "y": "*bf16", "post": "*fp32", "comb": "*fp32", "mixed": "*bf16",
        "y_stride": "i32:16", "N": N, "D": D, "LANES": MIX_LANES,
    },
    warps=4,
    shape={"rows": 16, "n": N, "d": D},
)  # fmt: skip

VARIANTS = (
    *(
        make(op, tile, rows)
        for op in ("hyper_pre", "hyper_mix_pre", "hyper_head")
        for tile, rows in ((SHORT, 32), (MIDDLE, 128), (LONG, 8192))
        for make in (_step, _finish)
    ),
    _MIX,
)
