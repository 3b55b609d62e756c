"""Tiles of the expert products by the instruction of 12.x, and their sources. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metainfer.kernels.cubin import Source

FOLDER = Path(__file__).parent
HEADERS = (FOLDER / "cuda_software.h", FOLDER / "cuda_ptx.h")


@dataclass(frozen=True, slots=True)
class MxTile:
    """`n` weight rows by `m` pairs: `warps`, `across` of them side by side over the pairs; `stages`
    blocks of 128 channels in flight."""

    n: int
    m: int
    warps: int
    across: int
    stages: int

    def shared_bytes(self) -> int:
        """Packed weights and activations of every stage."""
        return self.stages * (self.n * 64 + self.m * 128)

    @property
    def few(self) -> bool:
        """Of few pairs: their results stay float32 until those of a token are added."""
        return self.m == 8

    def source(self, software: int = 0) -> Source:
        """`software`: for cards without the instruction; 1: in words, 2: by that of FP8."""
        sizes = {"N": self.n, "M": self.m, "WARPS": self.warps, "ACROSS": self.across}
        sizes["STAGES"] = self.stages
        defines = [f"-DMX_{name}={size}" for name, size in sizes.items()]
        defines += [f"-DMX_SOFTWARE={software}"] if software else []
        return Source("experts", FOLDER / "cuda_experts.cu", HEADERS, tuple(defines))


MX_STREAM = MxTile(n=256, m=8, warps=8, across=1, stages=5)
MX_CHUNK = MxTile(n=256, m=64, warps=8, across=2, stages=3)
MX_TILES = (MX_STREAM, MX_CHUNK)


def mx_for(pairs: int, experts: int) -> MxTile:
    """The tile by the pairs that an expert gets on average (seed: as the other portable form)."""
    return MX_STREAM if pairs <= 8 * experts else MX_CHUNK
