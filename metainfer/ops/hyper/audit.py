"""Variants of the hyper-connection kernels that are compiled for every target."""

from typing import Any

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


def _form(op: str, tile: Tile, rows: int, early: bool, part: str = "") -> dict[str, Any]:
    """Fields that both launches' variants share. `early`: as on cards that can."""
    apart = f"-{rows}{'-early' if early else ''}"
    can = ("sm_90", "sm_120") if early else ("sm_80", "sm_86", "sm_89")
    return {
        "impl": f"{op}/triton",
        "name": f"{op.replace('_', '-')}{part}{apart}",
        "shape": {"rows": rows, "n": N, "d": D},
        "targets": can if tile.early else (),
    }


def _step(op: str, tile: Tile, rows: int, early: bool = False) -> Variant:
    numbers = _numbers(op)
    sizes = {"NW": numbers, "NL": product_lanes(numbers), "M": tile.m, "BD": tile.d}
    streams: dict[str, str | int | bool]
    if tile is SHORT:
        kernel = "step_kernel"
        streams = {
            "streams": "*bf16", "y": "*bf16", "post": "*fp32", "comb": "*fp32", "mixed": "*bf16",
            "fn": "*fp32", "parts": "*fp32", "rows": "i32", "splits": "i32", "steps": "i32",
            "y_stride": "i32:16", "N": N, "D": D, **sizes, "MIX": op == "hyper_mix_pre",
            "ACROSS": tile.across, "EARLY": early,
        }  # fmt: skip
    else:
        kernel = "product_kernel"
        streams = {
            "streams": "*bf16", "fn": "*fp32", "parts": "*fp32", "rows": "i32", "steps": "i32",
            "K": N * D, **sizes, "DOWN": tile.down,
        }  # fmt: skip
    return Variant(
        **_form(op, tile, rows, early),
        kernel=f"{MODULE}_direct:{kernel}",
        args=streams,
        warps=tile.warps,
        mma="mma.sync",
        spill_bytes=16,
        why="two addresses wait beside the loop where that lets another program fit on a unit",
    )


def _finish(op: str, tile: Tile, rows: int, early: bool = False) -> Variant:
    numbers = _numbers(op)
    args: dict[str, str | int | bool] = {
        "streams": "*bf16", "parts": "*fp32", "base": "*fp32", "scale": "*fp32",
        "weight": "*fp32", "x": "*bf16", "post": "*fp32", "comb": "*fp32", "rows": "i32",
        "splits": "i32", "norm_eps": "fp32", "eps": "fp32", "iters": "i32", "N": N, "D": D,
        "DL": D, "NW": numbers, "NL": product_lanes(numbers), "SPLITS": tile.splits,
        "B": tile.batch, "HEAD": op == "hyper_head", "EARLY": early,
    }  # fmt: skip
    return Variant(
        **_form(op, tile, rows, early, "-finish"),
        kernel=f"{MODULE}:finish_kernel",
        args=args,
        warps=finish_warps(D),
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
        make(op, tile, rows, early)
        for op in ("hyper_pre", "hyper_mix_pre", "hyper_head")
        for tile, rows, early in (
            (SHORT, 32, False), (SHORT, 32, True), (MIDDLE, 128, False), (LONG, 8192, False),
        )
        for make in (_step, _finish)
    ),
    _MIX,
)  # fmt: skip
