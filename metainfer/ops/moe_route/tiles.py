"""Sizes of the routing kernels, read by kernels, calls, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tile:
    """`m` tokens by `e` experts, `k` channels a step; `splits` programs share out the channels.
    `early`: both launches begin while the one before ends, on cards that can (9.0 and newer)."""

    m: int
    e: int
    k: int
    splits: int
    warps: int
    stages: int
    early: bool = False

    def step(self, gate: int) -> int:
        """Channels a step of a gate of `gate` bytes a number: half as many where it is wide."""
        return self.k if gate <= 2 else self.k // 2

    def share(self, k: int, gate: int) -> int:
        """Steps of one program over `k` channels."""
        steps = -(-k // self.step(gate))
        return -(-steps // self.splits)

    def shared_bytes(self, element: int, gate: int) -> int:
        """Upper estimate: buffers of tokens and gate, and the three parts of a wide gate."""
        step = self.step(gate)
        parts = 3 * self.e * step * element if gate > element else 0
        return self.stages * step * (self.m * element + self.e * gate) + parts + 2048


FEW = Tile(m=16, e=16, k=128, splits=8, warps=4, stages=5)
SOME = Tile(m=64, e=32, k=64, splits=8, warps=4, stages=5)
MANY = Tile(m=128, e=128, k=64, splits=4, warps=8, stages=3)
WHOLE = Tile(m=128, e=128, k=64, splits=1, warps=8, stages=3)

TILES = {"few": FEW, "some": SOME, "many": MANY, "whole": WHOLE}
EARLY = {"few": replace(FEW, early=True), "some": replace(SOME, early=True)}
"""Of few tokens a start costs as much as the work."""
MOST = {"few": 32, "some": 256, "many": 4096}
"""Most tokens of a tile: each kind has about as many programs as a card has multiprocessors."""


def tile_for(rows: int, capability: tuple[int, int] | None = None) -> Tile:
    """From shapes and card alone: a token's sums are the same in every call of its size."""
    kind = next((kind for kind, most in MOST.items() if rows <= most), "whole")
    early = capability is not None and capability >= (9, 0)
    return EARLY.get(kind, TILES[kind]) if early else TILES[kind]


def lanes(experts: int) -> int:
    """Experts as the choice holds them: a power of two, at least 16."""
    return max(16, 1 << (experts - 1).bit_length())
