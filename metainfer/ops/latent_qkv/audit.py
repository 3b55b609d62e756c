"""Variants of the latent kernel that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.latent_qkv.tiles import WARPS, heads_per_program

HEADS, D, R = 64, 512, 64


def _latent(scaled: bool) -> Variant:
    """Pages of 64 latents."""
    args: dict[str, str | int | bool] = {
        "q": "*bf16", "kv": "*bf16", "weight": "*fp32", "positions": "*i64", "cos_sin": "*fp32",
        "data": "*u8" if scaled else "*bf16", "slots": "*i64", "out": "*bf16", "q_stride": "i32:16",
        "kv_stride": "i32:16", "eps": "fp32", "H": HEADS, "D": D, "LANES": D, "R": R,
        "HB": heads_per_program(D, HEADS), "NORM_Q": True, "FORM": int(scaled),
        "GROUP": 64 * scaled, "TAIL": R, "SCALES": 8 * scaled, "PAGE": 64,
        "STRIDE": 576 * 65 if scaled else 64 * D,
    }  # fmt: skip
    return Variant(
        impl=f"latent_qkv/triton{'-fp8' * scaled}",
        name=f"latent-qkv{'-fp8' * scaled}",
        kernel="metainfer.ops.latent_qkv.triton:latent_kernel",
        args=args,
        warps=WARPS,
        shape={"rows": 8, "hq": HEADS, "d": D, "rotated": R, "page": 64},
    )


VARIANTS = (_latent(False), _latent(True))
