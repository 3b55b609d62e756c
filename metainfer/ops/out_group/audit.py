"""Variants of the grouped FP8 products that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.out_group.tiles import CHUNK, CHUNK_WGMMA, HOPPER, OTHERS, GroupTile

MODULE = "metainfer.ops.out_group.triton_group"
GROUPS, R, K = 8, 1024, 4096
ALL = ("sm_80", "sm_89", "sm_90", "sm_120")
REST = ("sm_89", "sm_120")


def _variant(tile: GroupTile, splits: int, targets: tuple[str, ...]) -> Variant:
    element = "u8" if targets == ("sm_80",) else "fp8e4nv"
    o, w = "*bf16", f"*{element}"
    if tile.tma:
        o = f"tensordesc<bf16[{tile.m}, {tile.k}]>"
        w = f"tensordesc<{element}[{tile.n}, {tile.k}]>"
    args: dict[str, str | int | bool] = {
        "o": o, "w": w, "scales": "*u8", "out": "*bf16", "parts": "*fp32", "counters": "*i32",
        "rows": "i32", "N": "i32:16", "scale_stride": "i32", "K": K, "R": R, "M": tile.m,
        "BN": tile.n, "BK": tile.k, "SPLITS": splits, "GROUP": tile.group, "E8M0": True,
        "TMA": tile.tma, "WIDE": "type:bfloat16", "EARLY": tile.early,
    }  # fmt: skip
    return Variant(
        impl="out_group/triton",
        name=f"out-group-{tile.m}-{targets[-1]}",
        kernel=f"{MODULE}:group_kernel",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape={"rows": tile.m, "hq": 64, "d": 512, "groups": GROUPS, "n": R},
        mma="bf16.bf16",
        targets=targets,
    )


VARIANTS = (
    *(_variant(tile, 2, ("sm_90",)) for tile in HOPPER),
    _variant(CHUNK_WGMMA, 1, ("sm_90",)),
    *(
        _variant(tile, splits, targets)
        for targets in (("sm_80",), REST)
        for tile, splits in (*((few, 2) for few in OTHERS), (CHUNK, 1))
        if tile.m != 128 or splits == 1
    ),
)
