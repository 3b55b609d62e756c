"""Variants of the sparse attention kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.attn_sparse.tiles import (
    FEW,
    FEW_SCALED,
    HOPPER,
    SLICED,
    SMALL_SCALED,
    WGMMA,
    WGMMA_SCALED,
    Tile,
)

MODULE = "metainfer.ops.attn_sparse.triton"
ON_HOPPER, REST = ("sm_90",), ("sm_80", "sm_89", "sm_120")
EIGHT, OLD = ("sm_89", "sm_120"), ("sm_80",)  # with the type e4m3, and without
SHAPE = {
    "rows": 8, "hq": 64, "d": 512, "rotated": 64, "window": 128, "ratio": 4, "top_k": 512,
    "context": 8192,
}  # fmt: skip


def _by_hand(splits: int, kind: str = "") -> Variant:
    """`kind` ``-fp8``: what a chunk of scaled latents is read with once they are decoded."""
    return Variant(
        impl=f"attn_sparse/triton-wgmma{kind}",
        name=f"sparse-wgmma{kind}-{splits}",
        kernel="metainfer.ops.attn_sparse.triton_wgmma:sparse_kernel",
        args={
            "q": "*bf16", "cache": "*bf16", "places": "*i64", "counts": "*i32", "sinks": "*fp32",
            "cos_sin": "*fp32", "positions": "*i64", "out": "*bf16", "parts": "*fp32",
            "peaks": "*fp32", "totals": "*fp32", "factor": "fp32", "items": "i32",
            "q_stride": "i32:16", "width": "i32", "H": 64, "D": 512, "R": 64, "HB": HOPPER.heads,
            "N": HOPPER.n, "SPLITS": splits, "WARPS": HOPPER.warps, "CHAINED": True,
        },
        warps=HOPPER.warps,
        shape=SHAPE,
        mma="wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
        targets=ON_HOPPER,
    )  # fmt: skip


def _sparse(
    tile: Tile, splits: int, scaled: int, targets: tuple[str, ...], few: bool = False
) -> Variant:
    """`scaled`: as the kernel's SCALED; `few`: the Hopper form's tile for few queries."""
    kind = "-fp8" if scaled else ""
    args: dict[str, str | int | bool] = {
        "q": "*bf16", "cache": "*u8" if scaled else "*bf16", "places": "*i64",
        "scale_places": "*i64", "counts": "*i32", "sinks": "*fp32", "cos_sin": "*fp32",
        "positions": "*i64", "out": "*bf16", "parts": "*fp32", "peaks": "*fp32",
        "totals": "*fp32", "factor": "fp32", "q_stride": "i32:16", "width": "i32", "H": 64,
        "D": 512, "R": 64, "HB": tile.heads, "N": tile.n, "SPLITS": splits, "EXACT": False,
        "SCALED": scaled, "CHAINED": few,
    }  # fmt: skip
    return Variant(
        impl=f"attn_sparse/triton{'-wgmma' if few else ''}{kind}",
        name=f"sparse{'-few' if few else ''}{kind}-{targets[-1]}-{splits}",
        kernel=f"{MODULE}:sparse_kernel",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape=SHAPE,
        mma="wgmma" if targets == ON_HOPPER and not few else "mma.sync",
        targets=targets,
    )


def _sliced(splits: int) -> Variant:
    args: dict[str, str | int | bool] = {
        "q": "*bf16", "cache": "*bf16", "places": "*i64", "counts": "*i32", "sinks": "*fp32",
        "cos_sin": "*fp32", "positions": "*i64", "out": "*bf16", "parts": "*fp32",
        "peaks": "*fp32", "totals": "*fp32", "factor": "fp32", "q_stride": "i32:16",
        "width": "i32", "H": 64, "D": 512, "R": 64, "HB": SLICED.heads, "N": SLICED.n,
        "SPLITS": splits, "EXACT": False,
    }  # fmt: skip
    return Variant(
        impl="attn_sparse/triton",
        name=f"sparse-sliced-{splits}",
        kernel="metainfer.ops.attn_sparse.triton_sliced:sliced_kernel",
        args=args,
        warps=SLICED.warps,
        stages=SLICED.stages,
        shape=SHAPE,
        mma="mma.sync",
        targets=REST,
    )


def _places(scaled: int) -> Variant:
    page = 64 * 584 if scaled else 0
    kind = "-fp8" if scaled else ""
    args: dict[str, str | int | bool] = {
        "local_table": "*i32", "entry_table": "*i32", "selected": "*i32", "positions": "*i64",
        "query_start": "*i32", "places": "*i64", "scale_places": "*i64", "counts": "*i32",
        "sequences": "i32", "window": "i32", "ratio": "i32", "local_width": "i32",
        "entry_width": "i32", "shift": "i64", "width": "i32", "LOCAL_PAGE": 64, "ENTRY_PAGE": 64,
        "TOP": 512, "TOP_LANES": 512, "ENTRIES": True, "ROW": 576 if scaled else 512,
        "LOCAL_BYTES": page, "ENTRY_BYTES": page, "SCALES": 8 if scaled else 0, "LANES": 1024,
        "CHAINED": False,
    }  # fmt: skip
    return Variant(
        impl=f"attn_sparse/triton{kind}",
        name=f"sparse-places{kind}",
        kernel=f"{MODULE}:places_kernel",
        args=args,
        warps=4,
        shape=SHAPE,
    )


_MERGE = Variant(
    impl="attn_sparse/triton",
    name="sparse-merge-16",
    kernel=f"{MODULE}:merge_kernel",
    args={
        "parts": "*fp32", "peaks": "*fp32", "totals": "*fp32", "counts": "*i32", "sinks": "*fp32",
        "cos_sin": "*fp32", "positions": "*i64", "out": "*bf16", "H": 64, "D": 512, "R": 64,
        "SPLITS": 16, "CHAINED": False,
    },
    warps=4,
    shape=SHAPE,
)  # fmt: skip


def _pages(scaled: int, targets: tuple[str, ...]) -> Variant:
    return Variant(
        impl="attn_sparse/triton-fp8",
        name=f"sparse-decoded-pages-{scaled}",
        kernel="metainfer.ops.attn_sparse.triton_decoded:pages_kernel",
        args={
            "data": "*u8", "table": "*i32", "positions": "*i64", "query_start": "*i32",
            "context_lens": "*i32", "held": "*bf16", "held_table": "*i32", "width": "i32",
            "stride": "i32", "window": "i32", "ratio": "i32", "spare": "i32", "PAGE": 64, "D": 512,
            "TAIL": 64, "ROW": 576, "BYTES": 64 * 584, "SCALES": 8, "STEP": 16, "SCALED": scaled,
        },
        warps=8,
        shape=SHAPE,
        targets=targets,
    )  # fmt: skip


VARIANTS = (
    *(_by_hand(splits) for splits in (1, 16)),
    _by_hand(1, "-fp8"),
    _sparse(FEW, 16, 0, ON_HOPPER, few=True),
    _sparse(FEW_SCALED, 16, 1, ON_HOPPER, few=True),
    *(_sparse(WGMMA, splits, 0, ON_HOPPER) for splits in (1, 16)),
    *(_sparse(WGMMA_SCALED, splits, 1, ON_HOPPER) for splits in (1, 16)),
    *(_sliced(splits) for splits in (1, 16)),
    *(_sparse(SMALL_SCALED, splits, 1, EIGHT) for splits in (1, 16)),
    *(_sparse(SMALL_SCALED, splits, 2, OLD) for splits in (1, 16)),
    *(_places(scaled) for scaled in (0, 1)),
    _MERGE,
    *(_pages(scaled, targets) for scaled, targets in ((1, (*ON_HOPPER, *EIGHT)), (2, OLD))),
)
