"""Variants of the MXFP4 expert kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.moe_experts.cuda_tiles import MX_CHUNK, MX_STREAM, MxTile
from metainfer.ops.moe_experts.sorting import (
    FEW_PAIRS,
    PLAN_ROWS,
    SLOTS,
    SORT_WARPS,
    SORTED_PAIRS,
    lanes,
)
from metainfer.ops.moe_experts.tiles import (
    CHUNK,
    CHUNK_WIDE,
    PORTABLE_CHUNK,
    PORTABLE_STREAM,
    STREAM,
    STREAM_WIDE,
    WGMMA_CHUNK,
    WGMMA_MANY,
    WGMMA_MIDDLE,
    WGMMA_SOME,
    WGMMA_STREAM,
    PipelinedTile,
    Tile,
    WgmmaTile,
)

PLAIN = "metainfer.ops.moe_experts.triton_mxfp4"
HOPPER = "metainfer.ops.moe_experts.triton_wgmma"
PIPELINED = "metainfer.ops.moe_experts.triton_pipelined"
EIGHTS = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
REST = ("sm_80", "sm_89", "sm_120")
FORMS = {"triton-wgmma": ("sm_90",), "triton": ("sm_89", "sm_120"), "triton-bf16": ("sm_80",)}
TABLES, BORDERS = ("triton-wgmma", "triton"), ("triton", "triton-bf16")
"""Forms whose products read a table of blocks, and those that read each expert's borders."""
D, F, E, TOP = 4096, 2048, 256, 6
NARROW = F // 8
"""Hidden channels of one rank of eight."""
WEIGHTS = {"w": "*i16", "scales": "*i32", "refs": "*u8"}
SHAPE = {"d": D, "f": F, "e": E, "top_k": TOP}


def _wgmma_of(m: int) -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{m}k32.f32.e4m3.e4m3"


def _wgmma(name: str, tile: WgmmaTile, up: bool) -> Variant:
    args: dict[str, str | int | bool] = {
        "q": "*fp8e4nv", "q_scales": "*fp32", "order": "*i32", "table": "*i32", "routes": "*fp32",
        **WEIGHTS, "out": "*bf16", "limit": "fp32", "K": D if up else F, "N": 2 * F if up else D,
        "TOP": TOP, "UP": up, "BN": tile.n, "M": tile.m, "U": tile.blocks, "STAGES": tile.stages,
        "WARPS": tile.warps,
    }  # fmt: skip
    return Variant(
        impl="moe_experts/triton-wgmma",
        name=f"experts-wgmma-{name}-{'up' if up else 'down'}",
        kernel=f"{HOPPER}:experts_kernel",
        args=args,
        warps=tile.warps,
        shape={"rows": 8, **SHAPE},
        mma=_wgmma_of(tile.m),
        targets=("sm_90", "sm_120"),
        spill_bytes=96 if tile == WGMMA_CHUNK else 0,
        why="four unrolled blocks of 64 tokens at 128 threads; faster than 8 warps without spill",
    )


def _pipelined(name: str, tile: PipelinedTile, up: bool, f: int = F) -> Variant:
    args: dict[str, str | int | bool] = {
        "q": "*fp8e4nv", "q_scales": "*fp32", "order": "*i32", "table": "*i32", "routes": "*fp32",
        **WEIGHTS, "w": "*i32", "out": "*bf16", "limit": "fp32", "K": D if up else f,
        "N": 2 * f if up else D, "TOP": TOP, "UP": up, "BN": tile.n, "M": tile.m,
        "LEAST": tile.least, "RING": tile.ring, "WARPS": tile.warps, "WGMMA": tile.wgmma,
    }  # fmt: skip
    return Variant(
        impl="moe_experts/triton-wgmma" if tile.wgmma else "moe_experts/triton",
        name=f"experts-{name}-{'up' if up else 'down'}",
        kernel=f"{PIPELINED}:pipelined_kernel",
        args=args,
        warps=tile.warps,
        shape={"rows": 8, **SHAPE, "f": f},
        mma=_wgmma_of(tile.m) if tile.wgmma else EIGHTS,
        targets=("sm_90", "sm_120") if tile.wgmma else REST,
        spill_bytes=160 if tile == WGMMA_MANY else 0,
        why="pointers of copies, stored and loaded once in four blocks",
    )


def _stream(tile: Tile, up: bool, wide: bool = False) -> Variant:
    args: dict[str, str | int | bool] = {
        "x" if up else "hidden": "*bf16" if wide else "*fp8e4nv", "x_scales": "*fp32",
        "ids": "*i32", **({"routes": "*fp32"} if up else {}), **WEIGHTS,
        "hidden" if up else "out": "*bf16" if up else "*fp32", **({"limit": "fp32"} if up else {}),
        "slots": "i32", "D": D, "F": F, **({"TOP": TOP} if up else {}), "BN": tile.n, "M": tile.m,
        "SLOTS": 64, "EIGHT": not wide, "WIDE": "type:bfloat16",
    }  # fmt: skip
    return _plain("stream_up_kernel" if up else "stream_down_kernel", args, tile, wide)


def _chunk(tile: Tile, up: bool, wide: bool = False) -> Variant:
    args: dict[str, str | int | bool] = {
        "q": "*bf16" if wide else "*fp8e4nv", "q_scales": "*fp32", "order": "*i64",
        "tiles": "*i64", "bounds": "*i64", **({"routes": "*fp32"} if up else {}), **WEIGHTS,
        "hidden" if up else "out": "*bf16",
        **({"limit": "fp32"} if up else {}), "D": D, "F": F, "E": E,
        **({"TOP": TOP} if up else {}), "BN": tile.n, "M": tile.m, "EIGHT": not wide,
        "WIDE": "type:bfloat16",
    }  # fmt: skip
    return _plain("chunk_up_kernel" if up else "chunk_down_kernel", args, tile, wide)


def _plain(kernel: str, args: dict[str, str | int | bool], tile: Tile, wide: bool) -> Variant:
    kind = "-bf16" if wide else ""
    return Variant(
        impl=f"moe_experts/triton{kind}",
        name=f"experts{kind}-{kernel.removesuffix('_kernel')}",
        kernel=f"{PLAIN}:{kernel}",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape={"rows": 8, **SHAPE},
        mma="bf16.bf16" if wide else EIGHTS,
        targets=("sm_80",) if wide else REST,
    )


def _around(form: str, kernel: str, name: str, args: dict[str, str | int | bool]) -> Variant:
    """What stands around the products of a form, on the cards that choose it."""
    return Variant(
        impl=f"moe_experts/{form}",
        name=f"experts{form.removeprefix('triton')}-{name}",
        kernel=f"metainfer.ops.moe_experts.{kernel}",
        args=args,
        warps=SORT_WARPS,
        shape={"rows": 8, **SHAPE},
        targets=FORMS[form],
    )


def _sort(form: str, table: bool, pairs: int) -> Variant:
    place, m = ("*i32", WGMMA_CHUNK.m) if table else ("*i64", CHUNK.m)
    args: dict[str, str | int | bool] = {
        "ids": "*i32", "counts": "*i32", "order": place, "table": "*i32", "tiles": "*i64",
        "bounds": "*i64", "pairs": "i32", "blocks": "i32", "share": "i32", "E": E, "EP": lanes(E),
        "M": m, "PAIRS": pairs, "TABLE": table,
    }  # fmt: skip
    name = f"sort-{'table' if table else 'bounds'}-{pairs or 'counted'}"
    return _around(form, "triton_sort:sort_kernel", name, args)


def _count(form: str) -> Variant:
    args: dict[str, str | int | bool] = {
        "ids": "*i32", "counts": "*i32", "pairs": "i32", "share": "i32", "EP": lanes(E),
    }  # fmt: skip
    return _around(form, "triton_sort:count_kernel", "count", args)


def _plan(form: str, pairs: int) -> Variant:
    args: dict[str, str | int | bool] = {
        "x": "*bf16", "q": "*fp8e4nv", "scales": "*fp32", "ids": "*i32", "order": "*i32",
        "table": "*i32", "rows": "i32", "x_stride": "i32:16", "pairs": "i32", "blocks": "i32",
        "K": D, "E": E, "EP": lanes(E), "M": WGMMA_STREAM.m, "ROWS": PLAN_ROWS, "PAIRS": pairs,
    }  # fmt: skip
    return _around(form, "triton_sort:plan_kernel", f"plan-{pairs}", args)


def _combine(form: str) -> Variant:
    args: dict[str, str | int | bool] = {
        "y": "*bf16", "ids": "*i32", "shared": "*bf16", "out": "*bf16", "D": D, "TOP": TOP,
        "BLOCK": 1024, "SHARED": True,
    }  # fmt: skip
    return _around(form, "triton_combine:combine_kernel", "combine", args)


BLOCK_SCALED = (
    "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e2m1.e4m3.f32"
)


def _native(name: str, tile: MxTile, kernel: str) -> Variant:
    """On the cards of the instruction itself."""
    product = kernel != "mx_round"
    return Variant(
        impl="moe_experts/cuda-mxf8f6f4",
        name=f"experts-native-{name}{kernel.removeprefix('mx')}".replace("_", "-"),
        kernel=kernel,
        cuda=tile.source(),
        warps=tile.warps,
        shape={"rows": 8, **SHAPE},
        mma=BLOCK_SCALED if product else "",
        targets=("sm_120",),
        shared_bytes=tile.shared_bytes() if product else 0,
    )


VARIANTS = (
    *(_wgmma("stream", WGMMA_STREAM, up) for up in (True, False)),
    *(_wgmma("chunk", WGMMA_CHUNK, up) for up in (True, False)),
    *(_pipelined("wgmma-some", WGMMA_SOME, up) for up in (True, False)),
    *(_pipelined("wgmma-middle", WGMMA_MIDDLE, up) for up in (True, False)),
    *(_pipelined("wgmma-many", WGMMA_MANY, up) for up in (True, False)),
    *(_pipelined("portable-stream", PORTABLE_STREAM, up) for up in (True, False)),
    *(_pipelined("portable-chunk", PORTABLE_CHUNK, up) for up in (True, False)),
    _pipelined("wgmma-some-narrow", WGMMA_SOME, False, NARROW),
    _pipelined("wgmma-many-narrow", WGMMA_MANY, False, NARROW),
    _pipelined("portable-stream-narrow", PORTABLE_STREAM, False, NARROW),
    _pipelined("portable-chunk-narrow", PORTABLE_CHUNK, False, NARROW),
    *(_stream(STREAM, up) for up in (True, False)),
    *(_chunk(CHUNK, up) for up in (True, False)),
    *(_sort(form, True, pairs) for form in TABLES for pairs in (0, SORTED_PAIRS)),
    *(_sort(form, False, pairs) for form in BORDERS for pairs in (0, SORTED_PAIRS)),
    *(_plan(form, pairs) for form in TABLES for pairs in (FEW_PAIRS, SLOTS, SORTED_PAIRS)),
    *(around(form) for form in FORMS for around in (_count, _combine)),
    *(_stream(STREAM_WIDE, up, wide=True) for up in (True, False)),
    *(_chunk(CHUNK_WIDE, up, wide=True) for up in (True, False)),
    *(_native("stream", MX_STREAM, kernel) for kernel in ("mx_round", "mx_up", "mx_down")),
    *(_native("chunk", MX_CHUNK, kernel) for kernel in ("mx_round", "mx_up", "mx_down")),
)
