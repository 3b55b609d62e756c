"""Variants of the sampling kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.sample.tiles import LANES, PART, WARPS

MODULE = "metainfer.ops.sample.triton"
SHAPE = {"rows": 8, "v": 129280}

VARIANTS = (
    Variant(
        impl="sample/triton",
        name="sample-best",
        kernel=f"{MODULE}:best_kernel",
        args={
            "logits": "*fp32", "parts": "*i64", "counters": "*i32", "best": "*fp32",
            "tokens": "*i64", "bad": "*i1", "vocab": "i32", "stride": "i32", "zero": "i32",
            "PART": PART, "PARTS": 32,
        },
        warps=WARPS,
        shape=SHAPE,
    ),
    Variant(
        impl="sample/triton",
        name="sample-draw",
        kernel=f"{MODULE}:draw_kernel",
        args={
            "logits": "*fp32", "best": "*fp32", "bad": "*i1", "temperature": "*fp32",
            "top_k": "*i64", "top_p": "*fp32", "min_p": "*fp32", "seed": "*i64", "index": "*i64",
            "numbers": "*i32", "weights": "*fp64", "counters": "*i32", "tokens": "*i64",
            "vocab": "i32", "stride": "i32", "has_k": "i32", "has_p": "i32", "has_min": "i32",
            "PART": PART, "LANES": LANES,
        },
        warps=WARPS,
        shape=SHAPE,
    ),
)  # fmt: skip
