"""Variants of the attention kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.attn_paged.tiles import NARROW, SPLIT, WIDE, WIDE_WGMMA, Tile, rows_for

_MODULE = "metainfer.ops.attn_paged.triton"
_KINDS = {WIDE: "wide", WIDE_WGMMA: "wgmma", NARROW: "narrow"}
_TARGETS = {WIDE: ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120"), WIDE_WGMMA: ("sm_90",)}
_STRIDES = ("q_stride", "page_stride", "token_stride")


def _variant(
    impl: str, tile: Tile, hq: int, hkv: int, d: int, page: int, windowed: bool, splits: int = 0
) -> Variant:
    group, lanes = hq // hkv, 1 << (d - 1).bit_length()
    args: dict[str, str | int | bool] = dict.fromkeys(("q", "k_cache", "v_cache"), "*bf16")
    if splits:
        args |= dict.fromkeys(("parts", "sums", "peaks"), "*fp32")
    else:
        args["out"] = "*bf16"
    args |= dict.fromkeys(("table", "query_start", "context_lens"), "*i32")
    args["factor"] = "fp32"
    if not splits:
        args["sequences"] = "i32"
    args |= {"window": "i32", **dict.fromkeys(_STRIDES, "i32:16"), "table_stride": "i32"}
    args |= {"HQ": hq, "GROUP": group, "D": d, "LANES": lanes, "PAGE": page}
    args |= {"M": rows_for(tile, group), "N": tile.n, "WINDOW": windowed, "EXACT": False}
    if splits:
        args["SPLITS"] = splits
    size = {"hq": hq, "hkv": hkv, "d": d, "page": page, "rows": 1}
    kind = "split" if splits else _KINDS[tile]
    return Variant(
        impl=f"attn_paged/{impl}",
        name=f"attn-{kind}-{hq}/{hkv}x{d}p{page}{'-window' * windowed}",
        kernel=f"{_MODULE}:{'split_kernel' if splits else 'attn_kernel'}",
        args=args,
        warps=tile.warps,
        stages=tile.stages,
        shape=size,
        mma="wgmma" if tile is WIDE_WGMMA else "mma.sync",
        targets=_TARGETS.get(tile, ()),
    )


def _combine(hq: int, hkv: int, d: int, splits: int) -> Variant:
    lanes = 1 << (d - 1).bit_length()
    return Variant(
        impl="attn_paged/triton-split",
        name=f"attn-combine-{hq}x{d}by{splits}",
        kernel=f"{_MODULE}:combine_kernel",
        args={
            **dict.fromkeys(("parts", "sums", "peaks"), "*fp32"),
            "out": "*bf16",
            "query_start": "*i32",
            "HQ": hq,
            "D": d,
            "LANES": lanes,
            "SPLITS": splits,
        },
        warps=4,
        shape={"hq": hq, "hkv": hkv, "d": d, "page": 16, "rows": 1},
    )


#: (Hq, Hkv, D, page): SmolLM2-135M, a 96-wide head, Qwen3-8B with two page sizes.
_SHAPES = ((9, 3, 64, 16), (32, 8, 96, 16), (32, 8, 128, 16), (32, 8, 128, 64))

VARIANTS = (
    *(_variant("triton", tile, *s, False) for tile in _KINDS for s in _SHAPES),
    *(_variant("triton", tile, 32, 8, 128, 16, True) for tile in (WIDE, WIDE_WGMMA)),
    *(_variant("triton-split", SPLIT, *s, False, splits=16) for s in _SHAPES),
    _variant("triton-split", SPLIT, 32, 8, 128, 16, True, splits=16),
    _combine(9, 3, 64, 4),
    _combine(32, 8, 128, 64),
)
