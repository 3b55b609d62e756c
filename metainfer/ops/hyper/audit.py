"""Variants of the hyper-connection kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.hyper.tiles import (
    FINISH_WARPS,
    LONG,
    MIX_LANES,
    SHORT,
    SINGLE,
    SPLIT_LANES,
    Tile,
    product_lanes,
)

MODULE = "metainfer.ops.hyper.triton"
N, D = 4, 4096
SITE = {"base": "*fp32", "scale": "*fp32", "weight": "*fp32", "x": "*bf16"}


def _sizes(head: bool) -> dict[str, str | int | bool]:
    return {"N": N, "NP": N, "D": D, "DL": D, "NL": product_lanes(N if head else (N + 2) * N)}


def _step(op: str, tile: Tile, rows: int, *targets: str, mma: str = "mma.sync") -> Variant:
    head = op == "hyper_head"
    sizes = _sizes(head)
    args: dict[str, str | int | bool] = {
        "streams": "*bf16", "y": "*bf16", "post": "*fp32", "comb": "*fp32", "mixed": "*bf16",
        "fn": "*fp32", "parts": "*fp32", "squares": "*fp32", "counters": "*i32", **SITE,
        "post_out": "*fp32", "comb_out": "*fp32", "rows": "i32", "splits": "i32", "steps": "i32",
        "y_stride": "i32:16", "norm_eps": "fp32", "eps": "fp32", "iters": "i32",
        "N": N, "NP": N, "D": D, "DL": D, "NW": N if head else (N + 2) * N, "NL": sizes["NL"],
        "M": tile.m, "PER": tile.per, "BD": tile.d, "SPLITS": SPLIT_LANES,
        "MIX": op == "hyper_mix_pre", "EXACT": False, "LAST": tile is SINGLE, "HEAD": head,
    }  # fmt: skip
    return Variant(
        impl=f"{op}/triton",
        name=f"{op.replace('_', '-')}-{rows}{'-wgmma' if mma == 'wgmma' else ''}",
        kernel=f"{MODULE}:step_kernel",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape={"rows": rows, "n": N, "d": D},
        mma=mma,
        spill_bytes=16 if op == "hyper_mix_pre" and tile is SINGLE else 0,
        why="two values that only the token's end reads wait beside the loop",
        targets=targets,
    )


def _finish(op: str) -> Variant:
    head = op == "hyper_head"
    args: dict[str, str | int | bool] = {
        "streams": "*bf16", "parts": "*fp32", "squares": "*fp32", **SITE, "post": "*fp32",
        "comb": "*fp32", "rows": "i32", "splits": "i32", "norm_eps": "fp32", "eps": "fp32",
        "iters": "i32", **_sizes(head), "SPLITS": SPLIT_LANES, "HEAD": head,
    }  # fmt: skip
    return Variant(
        impl=f"{op}/triton",
        name=f"{op.replace('_', '-')}-finish",
        kernel=f"{MODULE}:finish_kernel",
        args=args,
        warps=FINISH_WARPS,
        shape={"rows": 16, "n": N, "d": D},
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

_OPS = ("hyper_pre", "hyper_mix_pre", "hyper_head")
_REST = ("sm_80", "sm_89", "sm_120")

VARIANTS = (
    *(_step(op, SINGLE, 1) for op in _OPS),
    *(_step(op, SHORT, 32) for op in _OPS),
    *(_step(op, LONG, 8192, *_REST) for op in _OPS),
    *(_step(op, LONG, 8192, "sm_90", mma="wgmma") for op in _OPS),
    *(_finish(op) for op in _OPS),
    _MIX,
)
