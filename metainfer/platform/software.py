"""Versions of the packages that decide what can run. Reads metadata; imports none of them.

A package that is installed is necessary for a kernel, never sufficient.
"""

from __future__ import annotations

import platform
from importlib import metadata

#: Name in `Facts.software` -> distributions that provide it, in order of preference.
PACKAGES: dict[str, tuple[str, ...]] = {
    "metainfer": ("metainfer",),
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton"),
    "numpy": ("numpy",),
    "transformers": ("transformers",),
    "tokenizers": ("tokenizers",),
    "safetensors": ("safetensors",),
    "gguf": ("gguf",),
    "flashinfer": ("flashinfer-python",),
    "flash_attn": ("flash-attn",),
    "flash_mla": ("flash-mla", "sgl-flash-mla"),
    "deep_gemm": ("deep-gemm", "sgl-deep-gemm"),
    "llguidance": ("llguidance",),
    "xgrammar": ("xgrammar",),
    "nvidia_nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nvidia_ml": ("nvidia-ml-py",),
    "ortools": ("ortools",),
    "ray": ("ray",),
    "diffusers": ("diffusers",),
    "av": ("av",),
    "opentelemetry": ("opentelemetry-sdk",),
}


def versions() -> dict[str, str | None]:
    """Package name -> version, None when absent. ``python`` is this interpreter's."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = next(
            (version for item in distributions if (version := _version(item)) is not None), None
        )
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
