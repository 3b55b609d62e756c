"""Sizes of the routing kernel, read by kernel, calls, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """`m` tokens by all experts, `k` channels a step."""

    m: int
    k: int
    warps: int
    stages: int

    def shared_bytes(self, experts: int, element: int) -> int:
        """Upper estimate: buffers of tokens and gate, the gate's parts where the product reads them
        from there, what the choice moves between warps."""
        gate = lanes(experts) * self.k
        parts = 3 * gate * element if self.m >= 64 else 0
        return (self.stages - 1) * (self.m * self.k * element + gate * 4) + parts + 8192


FEW = Tile(m=16, k=32, warps=8, stages=3)
FEW_WIDE = Tile(m=16, k=32, warps=8, stages=2)
MANY = Tile(m=64, k=32, warps=8, stages=2)
MANY_WIDE = Tile(m=32, k=32, warps=8, stages=2)

FEW_ROWS = 256
"""Most tokens whose channels are shared out over programs: the whole card reads the gate."""

MAX_SPLITS = 32


def lanes(experts: int) -> int:
    """Experts as a tile holds them: a power of two, at least 16."""
    return max(16, 1 << (experts - 1).bit_length())


def tile_for(rows: int, experts: int) -> Tile:
    """More than 256 experts leave less room."""
    if rows <= FEW_ROWS:
        return FEW if experts <= 256 else FEW_WIDE
    return MANY if experts <= 256 else MANY_WIDE


def splits_for(rows: int, k: int, units: int) -> int:
    """Programs that share the channels of a block of few tokens: from shapes alone."""
    if rows > FEW_ROWS:
        return 1
    steps, blocks = -(-k // FEW.k), -(-rows // FEW.m)
    return max(1, min(MAX_SPLITS, steps // 2, units // blocks))
