"""Words shared by the folders' declarations. No torch."""

from __future__ import annotations

from typing import Any

from metainfer.core.verdict import Verdict, require
from metainfer.formats.blocks import FORMATS
from metainfer.kernels.conditions import (
    capability,
    compiler,
    custom,
    device_kind,
    package,
    weight_schemes,
)
from metainfer.kernels.impl import Context, Impl, Numerics, Setting

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

BLOCK_SCALED = frozenset(FORMATS)
"""Storage schemes that `formats.blocks` describes."""

STORED = {"weight": "stored@1"}
"""Matrices as the checkpoint holds them."""


def _one_scheme(context: Context) -> bool:
    return len(set(context.request.schemes)) <= 1


#: What reads ``stored@1``: one format in a matrix.
RECIPE = (
    ON_EITHER,
    weight_schemes(*sorted(PLAIN), *sorted(BLOCK_SCALED)),
    custom("weight-scheme", _one_scheme, "reads weights of one scheme, this site mixes several"),
)


def own_matrix_unit(context: Context) -> Verdict:
    """The device multiplies matrices of the activation type natively (float32: everywhere)."""
    device, dtype = context.facts.device, context.request.dtype
    return require(
        dtype == "float32" or dtype in (device.dot_types or frozenset()),
        "dot-type",
        f"no native {dtype} matrix instruction on {device.name}",
        element=dtype,
    )


def triton(op: str, load: str, **more: Any) -> Impl:
    """A Triton kernel. `load` counts from this package; `more` are further fields of `Impl`."""
    base = {
        "name": "triton",
        "dtypes": SHORT,
        "conditions": TRITON,
        "native_when": (ON_CUDA,),
        "graph_safe": True,
    }
    return _impl(op, load, "triton", base | more)


def compiled_c(op: str, load: str, **more: Any) -> Impl:
    """Compiled C in float32 on the host."""
    base = {
        "name": "c",
        "dtypes": FLOAT32,
        "conditions": C_ON_CPU,
        "native_when": NATIVE_ON_CPU,
    }
    return _impl(op, load, "c", base | more)


def compiled_cuda(op: str, load: str, **more: Any) -> Impl:
    """A kernel in CUDA C++, compiled at its first call (`kernels.cubin`). That there is a compiler
    and what it makes is right is for qualification."""
    return _impl(op, load, "cuda", {"graph_safe": True} | more)


def portable(op: str, load: str, **more: Any) -> Impl:
    """Torch's own operators, on host and card alike."""
    base = {
        "name": "torch",
        "dtypes": FLOATS,
        "conditions": (ON_EITHER,),
        "native_when": NATIVE_ON_CPU,
        "graph_safe": True,
    }
    return _impl(op, load, "torch", base | more)


def foreign(op: str, load: str, *, library: str, **more: Any) -> Impl:
    """A kernel of another's library, by its adapter file; named after it."""
    base = {
        "name": library.replace("_", "-"),
        "library": library,
        "dtypes": frozenset({"bfloat16"}),
        "numerics": Numerics.NATIVE,
        "graph_safe": True,
    }
    return _impl(op, load, "vendor", base | more)


def reference(op: str, load: str, **more: Any) -> Impl:
    """The reference: any device, every float type."""
    return _impl(op, load, "reference", {"name": "ref", "dtypes": FLOATS} | more)


def thread_settings(context: Context) -> tuple[Setting, ...]:
    """Numbers of threads of a C kernel: all that torch has (0), and fewer: short work costs less
    than to wake them."""
    cores = context.facts.host.usable_cores or 1
    counts = [count for count in (1, 2, 4, 8, 16) if count < cores]
    return tuple(Setting({"threads": count}) for count in (0, *counts))


def _impl(op: str, load: str, provider: str, fields: dict[str, Any]) -> Impl:
    if "rounds" in fields:
        fields["rounds"] = f"metainfer.ops.{fields['rounds']}"
    return Impl(op=op, load=f"metainfer.ops.{load}", provider=provider, **fields)
