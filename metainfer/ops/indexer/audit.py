"""Variants of the indexer's kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.indexer.tiles import (
    GROUP,
    SCORE,
    STREAM,
    WIDE_SCORE,
    Tile,
    padded_heads,
    query_heads,
    select_warps,
)

MODULE = "metainfer.ops.indexer.triton"
SHAPE = {
    "rows": 8, "seqs": 8, "heads": 64, "d": 128, "rotated": 64, "ratio": 4, "top_k": 512,
    "context": 131072,
}  # fmt: skip
#: Suffix of an implementation's name -> bits of a stored element, channels that share a scale.
FORMS = {"": (0, 0), "-fp8": (8, 128), "-fp4": (4, 32)}


def _query(suffix: str, rows: int) -> Variant:
    bits, group = FORMS[suffix]
    args: dict[str, str | int | bool] = {
        "q": "*bf16", "positions": "*i64", "cos_sin": "*fp32", "out": "*bf16", "H": 64, "D": 128,
        "R": 64, "N": query_heads(rows), "LAYOUT": bits, "GROUP": group, "MIXED": bits > 0,
    }  # fmt: skip
    return Variant(
        impl=f"index_query/triton{suffix}",
        name=f"index-query{suffix}-{rows}",
        kernel=f"{MODULE}_query:query_kernel",
        args=args,
        warps=4,
        shape=SHAPE,
    )


def _score(
    suffix: str, tile: Tile, heads: int = 64, d: int = 128, spill: int = 0, why: str = ""
) -> Variant:
    bits, group = FORMS[suffix]
    group = min(group, d)
    alone = tile == STREAM
    args: dict[str, str | int | bool] = {
        "q": "*bf16", "g": "*fp32", "data": "*u8" if bits else "*bf16", "page_table": "*i32",
        "positions": "*i64", "query_start": "*i32", "scores": "*i32", "largest": "*i32",
        "greatest": "*i32", "sequences": "i32", "first": "i32",
        **({} if alone else {"last": "i32", "block": "i32"}),
        "ratio": "i32", "top_k": "i32", "scale": "fp32", "g_stride": "i32", "table_stride": "i32",
        "room": "i32", "bytes": "i32", "H": heads, "HB": padded_heads(heads), "D": d, "N": tile.n,
        "PAGE": 64, "LAYOUT": bits, "GROUP": group, "NEAR": GROUP, "LEVELS": 2,
        "EXACT": False, "WIDE": tile.channels(d, group, bits),
    }  # fmt: skip
    kind, narrow = "score-one" if alone else "score", "" if d == 128 else f"x{d}"
    return Variant(
        impl=f"index_select/triton{suffix}",
        name=f"index-{kind}{'-wide' if tile == WIDE_SCORE else ''}{suffix}-{heads}{narrow}",
        kernel=f"{MODULE}:{kind.replace('-', '_')}_kernel",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape={**SHAPE, "heads": heads, "d": d},
        mma="mma",
        spill_bytes=spill,
        why=why,
        targets=("sm_90",) if tile == WIDE_SCORE else (),
    )


def _select(lanes: int) -> Variant:
    return Variant(
        impl="index_select/triton",
        name=f"index-select-{lanes}",
        kernel=f"{MODULE}_select:select_kernel",
        args={
            "scores": "*i32", "largest": "*i32", "greatest": "*i32", "lists": "*i32",
            "positions": "*i64", "query_start": "*i32", "out": "*i32", "sequences": "i32",
            "first": "i32", "ratio": "i32", "top_k": "i32", "room": "i32", "keep": "i32",
            "NEAR": GROUP, "LANES": lanes,
        },
        warps=select_warps(lanes),
        shape=SHAPE,
    )  # fmt: skip


VARIANTS = (
    *(_query(suffix, rows) for suffix in FORMS for rows in (1, 8192)),
    *(_score(suffix, tile) for suffix in FORMS for tile in (STREAM, SCORE)),
    *(_score(suffix, WIDE_SCORE) for suffix in FORMS),
    *(_score("-fp4", tile, 4, d=16) for tile in (STREAM, SCORE)),  # its cases' width
    _score("-fp8", SCORE, 32),  # GLM-5's indexer
    _score("-fp8", STREAM, 32, spill=16, why="four words a thread by Triton 3.7 on sm_89 alone"),
    *(_select(lanes) for lanes in (2048, 8192, 16384)),
)
