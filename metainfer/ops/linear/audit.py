"""Variants of the FP8 products that are compiled for every target."""

from dataclasses import replace

from metainfer.kernels.variant import Variant
from metainfer.ops.linear.tiles import (
    CHUNK,
    CHUNK_FEW,
    CHUNK_FEW_WGMMA,
    CHUNK_WGMMA,
    CHUNK_WIDE,
    STREAM,
    STREAM_SHORT,
    STREAM_SHORT_WIDE,
    STREAM_SMALL,
    STREAM_SMALL_WIDE,
    STREAM_WIDE,
    ChunkTile,
    StreamTile,
)

MODULE = "metainfer.ops.linear.triton_fp8"
HOPPER, REST = ("sm_90",), ("sm_80", "sm_89", "sm_120")
OLD = ("sm_80",)
"""Cards without e4m3 run the bfloat16 form; others could, and have a faster one."""


def _stream(name: str, tile: StreamTile, n: int, k: int, rows: int, splits: int,
            targets: tuple[str, ...], wide: bool = False) -> Variant:  # fmt: skip
    args: dict[str, str | int | bool] = {
        "x": "*bf16", "w": "*u8" if wide else "*fp8e4nv", "scales": "*u8", "out": "*bf16",
        "parts": "*fp32", "counters": "*i32", "rows": "i32", "x_stride": "i32:16", "N": "i32:16",
        "scale_stride": "i32", "K": k, "M": rows, "BN": tile.n, "SPLITS": splits,
        "STEPS": k // 128 // splits, "E8M0": True, "EIGHT": not wide, "WIDE": "type:bfloat16",
        "EARLY": tile.early,
    }  # fmt: skip
    kind = "bf16" if wide else "fp8"
    return Variant(
        impl="linear/triton-bf16" if wide else "linear/triton",
        name=f"linear-{kind}-stream-{name}-{targets[-1]}-{rows}",
        kernel=f"{MODULE}:stream_kernel",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape={"rows": rows, "n": n, "k": k},
        mma="bf16.bf16" if wide else "e4m3.e4m3",
        targets=targets,
    )


def _chunk(
    tile: ChunkTile, n: int, k: int, targets: tuple[str, ...], wide: bool = False, splits: int = 1
) -> Variant:
    q, w = ("*bf16", "*u8") if wide else ("*fp8e4nv", "*fp8e4nv")
    if tile.tma:
        q, w = f"tensordesc<fp8e4nv[{tile.m}, 128]>", f"tensordesc<fp8e4nv[{tile.n}, 128]>"
    args: dict[str, str | int | bool] = {
        "q": q, "q_scales": "*fp32", "w": w, "scales": "*u8", "out": "*bf16", "parts": "*fp32",
        "counters": "*i32", "rows": "i32", "scale_rows": "i32", "N": "i32:16",
        "scale_stride": "i32", "K": k, "BM": tile.m, "BN": tile.n, "GROUP": tile.group,
        "SPLITS": splits, "E8M0": True, "TMA": tile.tma, "EIGHT": not wide, "WIDE": "type:bfloat16",
    }  # fmt: skip
    kind = "bf16" if wide else "fp8"
    return Variant(
        impl="linear/triton-bf16" if wide else "linear/triton",
        name=f"linear-{kind}-chunk-{tile.m}x{tile.n}-{n}x{k}x{splits}-{targets[-1]}",
        kernel=f"{MODULE}:chunk_kernel",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape={"rows": 8192, "n": n, "k": k},
        mma="bf16.bf16" if wide else "e4m3.e4m3",
        targets=targets,
    )


_QUANTISE = Variant(
    impl="linear/triton",
    name="quantise-fp8-4096",
    kernel=f"{MODULE}:quantise_kernel",
    args={
        "x": "*bf16", "q": "*fp8e4nv", "scales": "*fp32", "rows": "i32", "stride": "i32",
        "row_stride": "i32", "block_stride": "i32", "K": 4096, "ROWS": 16, "BLOCKS": 4,
        "MIXED": False,
    },
    warps=8,
    shape={"rows": 8192, "n": 4096, "k": 4096},
)  # fmt: skip

_QUANTISE_WIDE = replace(
    _QUANTISE,
    impl="linear/triton-bf16",
    name="quantise-bf16-4096",
    args={**_QUANTISE.args, "q": "*bf16"},
)

VARIANTS = (
    _stream("wq_b", STREAM, 32768, 1024, 16, 1, HOPPER),
    _stream("wo_b", STREAM, 4096, 8192, 16, 8, HOPPER),
    _stream("wkv", STREAM_SHORT, 1536, 4096, 16, 16, HOPPER),
    _stream("wo_b", STREAM_WIDE, 4096, 8192, 32, 8, HOPPER),
    _stream("wkv", STREAM_SHORT_WIDE, 1536, 4096, 32, 8, HOPPER),
    _stream("wq_b", STREAM_SMALL, 32768, 1024, 16, 1, REST),
    _stream("wo_b", STREAM_SMALL, 4096, 8192, 16, 4, REST),
    _stream("wo_b", STREAM_SMALL_WIDE, 4096, 8192, 32, 4, REST),
    _chunk(CHUNK_WGMMA, 32768, 1024, HOPPER),
    _chunk(CHUNK_WGMMA, 4096, 8192, HOPPER),
    _chunk(CHUNK_FEW_WGMMA, 4096, 8192, HOPPER, splits=4),
    _chunk(CHUNK_FEW_WGMMA, 32768, 1024, HOPPER),
    _chunk(CHUNK, 32768, 1024, REST),
    _chunk(CHUNK, 4096, 8192, REST),
    _chunk(CHUNK_FEW, 4096, 8192, REST, splits=4),
    _QUANTISE,
    _stream("wq_b", STREAM_SMALL, 32768, 1024, 16, 1, OLD, wide=True),
    _stream("wo_b", STREAM_SMALL, 4096, 8192, 16, 4, OLD, wide=True),
    _stream("wo_b", STREAM_SMALL_WIDE, 4096, 8192, 32, 4, OLD, wide=True),
    _chunk(CHUNK_WIDE, 32768, 1024, OLD, wide=True),
    _chunk(CHUNK_WIDE, 4096, 8192, OLD, wide=True),
    _chunk(CHUNK_FEW, 4096, 8192, OLD, wide=True, splits=4),
    _QUANTISE_WIDE,
)
