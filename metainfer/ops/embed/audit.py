"""Variants of the embedding kernel that are compiled for every target."""

from metainfer.kernels.variant import Variant

VARIANTS = (
    Variant(
        impl="embed/triton",
        name="embed",
        kernel="metainfer.ops.embed.triton:embed_kernel",
        args={"ids": "*i64", "table": "*bf16", "out": "*bf16", "D": "i32:16", "BLOCK": 1024},
        warps=4,
        shape={"d": 4096, "rows": 1},
    ),
)
