"""Variants of the norm kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.norm.tiles import rows_per_program, warps_for


def _variant(op: str, d: int) -> Variant:
    pointers = ("x", "weight", "out") if op == "rmsnorm" else (
        "x", "residual", "weight", "out", "total"
    )  # fmt: skip
    strides = ("stride",) if op == "rmsnorm" else ("stride", "residual_stride")
    block = 1 << (d - 1).bit_length()
    per = rows_per_program(d)
    args: dict[str, str | int | bool] = dict.fromkeys(pointers, "*bf16")
    args |= {"rows": "i32", **dict.fromkeys(strides, "i32:16"), "eps": "fp32"}
    args |= {"D": d, "BLOCK": block, "ROWS": per}
    return Variant(
        impl=f"{op}/triton",
        name=f"{op}-{d}",
        kernel=f"metainfer.ops.norm.triton:{op}_kernel",
        args=args,
        warps=warps_for(block * per),
        shape={"d": d, "rows": 1},
    )


VARIANTS = (
    *(_variant("rmsnorm", d) for d in (64, 128, 576, 4096)),
    *(_variant("add_rmsnorm", d) for d in (576, 4096, 8192)),
)
