"""Words shared by the folders' declarations. No torch."""

from __future__ import annotations

from metainfer.kernels.conditions import compiler, device_kind

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
