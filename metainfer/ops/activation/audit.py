"""Variants of the activation kernel that are compiled for every target."""

from metainfer.kernels.variant import Variant


def _variant(op: str, f: int) -> Variant:
    return Variant(
        impl=f"{op}/triton",
        name=op.replace("_", "-"),
        kernel="metainfer.ops.activation.triton:swiglu_kernel",
        args={
            "gate_up": "*bf16",
            "out": "*bf16",
            "stride": "i32:16",
            "limit": "fp32",
            "F": "i32:16",
            "BLOCK": 1024,
            "CLAMP": op == "swiglu_clamp",
        },
        warps=4,
        shape={"f": f, "rows": 1},
    )


VARIANTS = (_variant("swiglu", 12288), _variant("swiglu_clamp", 2048))
