"""Words shared by the folders' declarations. No torch."""

from __future__ import annotations

from metainfer.kernels.conditions import device_kind

FLOATS = frozenset({"float32", "bfloat16", "float16", "float64"})
SHORT = frozenset({"float32", "bfloat16", "float16"})
HALVES = frozenset({"bfloat16", "float16"})

ON_CPU = device_kind("cpu")
ON_CUDA = device_kind("cuda")
ON_EITHER = device_kind("cpu", "cuda")

NATIVE_ON_CPU = (ON_CPU,)
"""On a CPU, torch and oneDNN are the device's own library."""
