"""Variants of the activation kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant

VARIANTS = (
    Variant(
        impl="swiglu/triton",
        name="swiglu",
        kernel="metainfer.ops.activation.triton:swiglu_kernel",
        args={"gate_up": "*bf16", "out": "*bf16", "stride": "i32:16", "F": "i32:16", "BLOCK": 1024},
        warps=4,
        shape={"f": 12288, "rows": 1},
    ),
)
