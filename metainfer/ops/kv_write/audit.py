"""Variants of the cache write kernel that are compiled for every target."""

from metainfer.kernels.variant import Variant


def _variant(hkv: int, d: int, page: int) -> Variant:
    strides = ("k_stride", "v_stride", "page_stride", "token_stride")
    return Variant(
        impl="kv_write/triton",
        name=f"kv_write-{hkv}x{d}p{page}",
        kernel="metainfer.ops.kv_write.triton:kv_write_kernel",
        args={
            **dict.fromkeys(("k", "v", "k_cache", "v_cache"), "*bf16"),
            "slots": "*i64",
            **dict.fromkeys(strides, "i32:16"),
            "PAGE": page,
            "WIDTH": hkv * d,
            "BLOCK": 1 << (hkv * d - 1).bit_length(),
        },
        warps=4,
        shape={"hkv": hkv, "d": d, "page": page, "rows": 1},
    )


VARIANTS = (_variant(3, 64, 16), _variant(8, 128, 16))
