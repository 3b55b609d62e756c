"""Variants of the routing kernels that are compiled for every target."""

from collections.abc import Mapping

from metainfer.kernels.variant import Variant
from metainfer.ops.moe_route.tiles import EARLY, FEW, MANY, TILES, WHOLE, Tile, lanes

K, TOP = 4096, 6
HOSTS: dict[bool, tuple[str, ...]] = {False: (), True: ("sm_90", "sm_120")}
OPS = {False: "moe_route", True: "moe_route_hash"}


def _shape(experts: int) -> dict[str, int]:
    return {"rows": 8, "k": K, "e": experts, "top_k": TOP}


def _score(
    kind: str, experts: int = 256, gate: str = "bf16", tiles: Mapping[str, Tile] = TILES
) -> Variant:
    tile, width = tiles[kind], 2 if gate == "bf16" else 4
    args: dict[str, str | int | bool] = {
        "x": "*bf16", "gate": f"*{gate}", "parts": "*fp32", "rows": "i32", "x_stride": "i32:16",
        "one": "fp32", "K": K, "E": experts, "EP": lanes(experts), "SHARE": tile.share(K, width),
        "M": tile.m, "BE": tile.e, "BK": tile.step(width), "EXACT": False,
        "EARLY": tile.early,
    }  # fmt: skip
    return Variant(
        impl="moe_route/triton",
        name=f"moe-route-score-{kind}-{gate}{'-early' * tile.early}-{experts}",
        kernel="metainfer.ops.moe_route.triton:score_kernel",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape=_shape(experts),
        mma="mma",
        targets=HOSTS[tile.early],
    )


def _choose(tile: Tile, by_token: bool, experts: int = 256) -> Variant:
    op = OPS[by_token]
    args: dict[str, str | int | bool] = {
        "parts": "*fp32", "bias": "*fp32", "table": "*i64", "tokens": "*i64", "ids": "*i32",
        "weights": "*fp32", "rows": "i32", "scale": "fp32", "E": experts, "EP": lanes(experts),
        "TOP": TOP, "PLACES": 8, "SPLITS": tile.splits, "HASH": by_token,
        "EARLY": tile.early,
    }  # fmt: skip
    return Variant(
        impl=f"{op}/triton",
        name=f"{op.replace('_', '-')}-choose-{tile.splits}{'-early' * tile.early}-{experts}",
        kernel="metainfer.ops.moe_route.triton:choose_kernel",
        args=args,
        warps=1,
        shape=_shape(experts),
        targets=HOSTS[tile.early],
    )


VARIANTS = (
    *(_score(kind, gate=gate) for kind in TILES for gate in ("bf16", "fp32")),
    *(_score(kind, 384) for kind in TILES),
    *(_choose(tile, by_token) for tile in (FEW, MANY, WHOLE) for by_token in OPS),
    _choose(FEW, False, 384),
    *(_score(kind, tiles=EARLY) for kind in EARLY),
    *(_choose(EARLY["few"], by_token) for by_token in OPS),
)
