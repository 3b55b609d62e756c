"""Variants of the grouped FP8 products that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.out_group.tiles import HOPPER, OTHERS, GroupTile

MODULE = "metainfer.ops.out_group.triton_group"
GROUPS, R, K = 8, 1024, 4096
OLD, REST = ("sm_80",), ("sm_89", "sm_120")
"""Cards without the type read bytes."""


def _element(targets: tuple[str, ...]) -> str:
    return "*u8" if targets == OLD else "*fp8e4nv"


def _few(tile: GroupTile, targets: tuple[str, ...]) -> Variant:
    return Variant(
        impl="out_group/triton",
        name=f"out-group-{tile.m}-{targets[-1]}",
        kernel=f"{MODULE}:group_kernel",
        args={
            "o": "*bf16", "w": _element(targets), "scales": "*u8", "out": "*bf16",
            "parts": "*fp32", "counters": "*i32", "rows": "i32", "N": "i32:16",
            "scale_stride": "i32", "K": K, "R": R, "M": tile.m, "BN": tile.n, "SPLITS": 2,
            "E8M0": True, "WIDE": "type:bfloat16",
        },
        warps=tile.warps,
        stages=tile.stages,
        shape={"rows": tile.m, "hq": 64, "d": 512, "groups": GROUPS, "n": R},
        mma="bf16.bf16",
        targets=targets,
    )  # fmt: skip


def _decode(targets: tuple[str, ...]) -> Variant:
    return Variant(
        impl="out_group/triton",
        name=f"out-group-decode-{targets[-1]}",
        kernel=f"{MODULE}:decode_kernel",
        args={
            "w": _element(targets), "scales": "*u8", "out": "*bf16", "scale_stride": "i32", "K": K,
            "ROWS": 32, "COLS": 512, "E8M0": True,
        },
        warps=4,
        shape={"rows": 8192, "hq": 64, "d": 512, "groups": GROUPS, "n": R},
        targets=targets,
    )  # fmt: skip


VARIANTS = (
    *(_few(tile, ("sm_90",)) for tile in HOPPER),
    *(_few(tile, targets) for targets in (OLD, REST) for tile in OTHERS),
    *(_decode(targets) for targets in (OLD, ("sm_89", "sm_90", "sm_120"))),
)
