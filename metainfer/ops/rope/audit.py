"""Variants of the rotary kernel that are compiled for every target."""

from metainfer.kernels.variant import Variant


def _variant(hq: int, hkv: int, d: int, r: int, pairs: bool) -> Variant:
    def power(count: int) -> int:
        return 1 << (count - 1).bit_length()

    return Variant(
        impl="rope/triton",
        name=f"rope-{hq}/{hkv}x{d}r{r}{'-pairs' * pairs}",
        kernel="metainfer.ops.rope.triton:rope_kernel",
        args={
            **dict.fromkeys(("q", "k", "q_out", "k_out"), "*bf16"),
            "positions": "*i64",
            "table": "*fp32",
            **dict.fromkeys(("q_stride", "k_stride"), "i32:16"),
            "HQ": hq,
            "HKV": hkv,
            "D": d,
            "R": r,
            "HQ_TILE": power(hq),
            "HKV_TILE": power(hkv),
            "HALF": power(r // 2),
            "PAIRS": pairs,
            "REST": power(max(d - r, 1)),
        },
        warps=4,
        shape={"hq": hq, "hkv": hkv, "d": d, "rotated": r, "rows": 1},
    )


VARIANTS = (
    _variant(9, 3, 64, 64, False),
    _variant(32, 8, 128, 128, False),
    _variant(32, 8, 96, 72, False),
    _variant(32, 8, 128, 128, True),
)
