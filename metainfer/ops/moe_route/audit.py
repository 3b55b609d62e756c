"""Variants of the routing kernel that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.moe_route.tiles import FEW_ROWS, lanes, tile_for

SHAPE = {"rows": 8, "k": 4096, "e": 256, "top_k": 6}


def _route(op: str, kind: str, experts: int = 256, top_k: int = 6) -> Variant:
    tile = tile_for(1 if kind == "few" else FEW_ROWS + 1, experts)
    by_token = op == "moe_route_hash"
    args: dict[str, str | int | bool] = {
        "x": "*bf16", "gate": "*fp32", "bias": "*fp32", "table": "*i64", "tokens": "*i64",
        "parts": "*fp32", "counters": "*i32", "ids": "*i32", "weights": "*fp32", "rows": "i32",
        "x_stride": "i32", "scale": "fp32", "share": "i32", "K": 4096, "E": experts,
        "EP": lanes(experts), "TOP": top_k, "PLACES": 8, "M": tile.m, "BK": tile.k,
        "HASH": by_token, "ALONE": kind == "many", "EXACT": False,
    }  # fmt: skip
    return Variant(
        impl=f"{op}/triton",
        name=f"{op.replace('_', '-')}-{kind}-{experts}",
        kernel="metainfer.ops.moe_route.triton:route_kernel",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape={**SHAPE, "e": experts, "top_k": top_k},
        mma="mma",
    )


VARIANTS = (
    *(_route(op, kind) for op in ("moe_route", "moe_route_hash") for kind in ("few", "many")),
    *(_route("moe_route", kind, 384) for kind in ("few", "many")),
)
