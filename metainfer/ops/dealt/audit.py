"""Variants of the kernels over dealt keys that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.attn_paged.tiles import SPLIT, rows_for

_MODULE = "metainfer.ops.dealt.triton"
_IMPL = "attn_paged_part/triton"


def _part(hq: int, hkv: int, d: int, page: int, splits: int) -> Variant:
    group, lanes = hq // hkv, 1 << (d - 1).bit_length()
    args: dict[str, str | int | bool] = dict.fromkeys(("q", "k_cache", "v_cache"), "*bf16")
    args |= dict.fromkeys(("parts", "sums", "peaks"), "*fp32")
    args |= {"table": "*i32", "counts": "*i64", "query_start": "*i32", "factor": "fp32"}
    args |= {"sequences": "i32"}
    args |= dict.fromkeys(("q_stride", "page_stride", "token_stride"), "i32:16")
    args |= {"table_stride": "i32", "HQ": hq, "GROUP": group, "D": d, "LANES": lanes, "PAGE": page}
    args |= {"M": rows_for(SPLIT, group), "N": SPLIT.n, "EXACT": False, "SPLITS": splits}
    return Variant(
        impl=_IMPL,
        name=f"part-{hq}/{hkv}x{d}p{page}",
        kernel=f"{_MODULE}:part_kernel",
        args=args,
        warps=SPLIT.warps,
        stages=SPLIT.stages,
        shape={"hq": hq, "hkv": hkv, "d": d, "page": page, "rows": 1},
        mma="mma.sync",
    )


def _log(hq: int, d: int, splits: int) -> Variant:
    args: dict[str, str | int | bool] = dict.fromkeys(
        ("parts", "sums", "peaks", "mixed", "logs"), "*fp32"
    )
    args |= {"HQ": hq, "D": d, "LANES": 1 << (d - 1).bit_length(), "SPLITS": splits}
    return Variant(
        impl=_IMPL,
        name=f"part-log-{hq}x{d}by{splits}",
        kernel=f"{_MODULE}:log_kernel",
        args=args,
        warps=4,
        shape={"hq": hq, "hkv": 1, "d": d, "page": 16, "rows": 1},
    )


def _weigh(ranks: int, heads: int, d: int, turned: int) -> Variant:
    """With what stands beside the parts where the tail is turned, as in DeepSeek-V4."""
    args: dict[str, str | int | bool] = dict.fromkeys(("mixed", "logs", "near", "cos_sin"), "*fp32")
    args |= {"positions": "*i64", "out": "*bf16", "tokens": "i32", "rank": "i32", "RANKS": ranks}
    args |= {"LANES_R": 1 << (ranks - 1).bit_length(), "HEADS": heads, "D": d}
    args |= {"LANES": 1 << (d - 1).bit_length(), "TURNED": turned, "BESIDE": turned > 0}
    return Variant(
        impl="attn_weigh/triton",
        name=f"weigh-{ranks}x{heads}x{d}{'-turned' * (turned > 0)}",
        kernel="metainfer.ops.dealt.triton_weigh:weigh_kernel",
        args=args,
        warps=4 if d > 256 else 1,
        shape={"rows": 1, "hq": ranks * heads, "d": d, "rotated": turned, "shards": ranks},
    )


#: (heads of the ranks of a group, Hkv, D, a rank's part of a page)
VARIANTS = (
    _part(4, 1, 128, 8, 16),
    _part(8, 1, 96, 32, 16),
    _part(32, 1, 128, 16, 16),
    _part(7, 1, 64, 8, 1),
    _log(8, 128, 16),
    _log(7, 64, 1),
    _log(32, 128, 64),
    _weigh(2, 4, 128, 0),
    _weigh(3, 2, 96, 0),
    _weigh(8, 8, 512, 64),
)
