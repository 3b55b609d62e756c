"""Variants of the indexer's kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.indexer.tiles import GROUP, QUERY_ROWS, SELECT_LANES, tile_for

MODULE = "metainfer.ops.indexer.triton"
SHAPE = {
    "rows": 8, "seqs": 8, "heads": 64, "d": 128, "rotated": 64, "ratio": 4, "top_k": 512,
    "context": 131072,
}  # fmt: skip
#: Suffix of an implementation's name -> bits of a stored element, channels that share a scale.
FORMS = {"": (0, 0), "-fp8": (8, 128), "-fp4": (4, 32)}


def _query(suffix: str) -> Variant:
    bits, group = FORMS[suffix]
    args: dict[str, str | int | bool] = {
        "q": "*bf16", "positions": "*i64", "cos_sin": "*fp32", "out": "*bf16", "rows": "i32",
        "H": 64, "D": 128, "R": 64, "N": QUERY_ROWS, "LAYOUT": bits, "GROUP": group,
        "MIXED": bits > 0, "EXACT": False,
    }  # fmt: skip
    return Variant(
        impl=f"index_query/triton{suffix}",
        name=f"index-query{suffix}",
        kernel=f"{MODULE}:query_kernel",
        args=args,
        warps=4,
        shape=SHAPE,
        mma="mma" if bits else "",
    )


def _score(suffix: str, heads: int = 64) -> Variant:
    bits, group = FORMS[suffix]
    tile = tile_for(bits > 0)
    args: dict[str, str | int | bool] = {
        "q": "*bf16", "g": "*fp32", "data": "*u8" if bits else "*bf16", "page_table": "*i32",
        "positions": "*i64", "query_start": "*i32", "scores": "*i32", "largest": "*i32",
        "sequences": "i32", "first": "i32", "last": "i32", "block": "i32", "ratio": "i32",
        "top_k": "i32", "scale": "fp32", "g_stride": "i32", "table_stride": "i32",
        "capacity": "i32", "bytes": "i32", "H": heads, "HB": heads, "D": 128, "N": tile.n,
        "PAGE": 64, "LAYOUT": bits, "GROUP": group, "NEAR": GROUP, "EXACT": False,
    }  # fmt: skip
    return Variant(
        impl=f"index_select/triton{suffix}",
        name=f"index-score{suffix}-{heads}",
        kernel=f"{MODULE}:score_kernel",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape={**SHAPE, "heads": heads},
        mma="mma",
    )


_SELECT = Variant(
    impl="index_select/triton",
    name="index-select",
    kernel=f"{MODULE}:select_kernel",
    args={
        "scores": "*i32", "largest": "*i32", "groups": "*i32", "positions": "*i64",
        "query_start": "*i32", "out": "*i32", "sequences": "i32", "first": "i32", "ratio": "i32",
        "top_k": "i32", "capacity": "i32", "NEAR": GROUP, "LANES": SELECT_LANES,
    },
    warps=8,
    shape=SHAPE,
)  # fmt: skip

VARIANTS = (
    *(_query(suffix) for suffix in FORMS),
    *(_score(suffix) for suffix in FORMS),
    _score("-fp8", 32),  # GLM-5's indexer
    _SELECT,
)
