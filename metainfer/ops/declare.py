"""Words shared by the folders' declarations. No torch."""

from __future__ import annotations

from metainfer.core.verdict import Verdict, require
from metainfer.kernels.conditions import capability, compiler, device_kind, package
from metainfer.kernels.impl import Context

FLOATS = frozenset({"float32", "bfloat16", "float16", "float64"})
SHORT = frozenset({"float32", "bfloat16", "float16"})
HALVES = frozenset({"bfloat16", "float16"})

ON_CPU = device_kind("cpu")
ON_CUDA = device_kind("cuda")
ON_EITHER = device_kind("cpu", "cuda")

FLOAT32 = frozenset({"float32"})

#: Compiled C: what `kernels.native` needs. That it builds and computes right is for qualification.
C_ON_CPU = (ON_CPU, compiler())

NATIVE_ON_CPU = (ON_CPU,)
"""On a CPU, torch and oneDNN are the device's own library."""

#: Triton kernels: bf16 and asynchronous copies begin with 8.0; older Triton was never tried.
TRITON = (ON_CUDA, capability((8, 0)), package("triton", (3, 6)))


PLAIN = frozenset({"F32", "F16", "BF16"})
"""Storage schemes of plain numbers."""

DENSE = {"weight": "dense@1"}
"""Plain matrices in the model's type."""


def own_matrix_unit(context: Context) -> Verdict:
    """The device multiplies matrices of the activation type natively (float32: everywhere)."""
    device, dtype = context.facts.device, context.request.dtype
    return require(
        dtype == "float32" or dtype in (device.dot_types or frozenset()),
        "dot-type",
        f"no native {dtype} matrix instruction on {device.name}",
        element=dtype,
    )
