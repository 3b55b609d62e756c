"""Make a tile fit the card, and a size fit a kernel's instantiations. Pure arithmetic.

Neither is silent: both results say what was asked for and what is used instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from metainfer.core.verdict import Reason

MIN_STAGES, MIN_K, MIN_SIDE = 2, 32, 16


@dataclass(frozen=True, slots=True)
class GemmTile:
    """A pipelined matrix-product tile: `m` x `n` outputs, `k` deep, `stages` buffers."""

    m: int
    n: int
    k: int
    stages: int

    def shared_bytes(self, element: int) -> int:
        """``(stages - 1) * (m + n) * k * element``."""
        return (self.stages - 1) * (self.m + self.n) * self.k * element


@dataclass(frozen=True, slots=True)
class Clamped:
    """What was asked for and the largest that fits; `tile` is None when nothing does."""

    asked: GemmTile
    tile: GemmTile | None
    reason: Reason | None


def clamp_tile(tile: GemmTile, element: int, limit: int) -> Clamped:
    """The first tile that fits `limit` bytes: fewer stages first, then less depth (with all stages
    again), then the longer side halved (with all stages and depth again)."""
    fitting = next((t for t in _smaller(tile) if t.shared_bytes(element) <= limit), None)
    if fitting == tile:
        return Clamped(tile, tile, None)
    used = "nothing smaller fits" if fitting is None else f"{_text(fitting)} is used"
    needed = tile.shared_bytes(element)
    reason = Reason(
        "shared-memory",
        f"tile {_text(tile)} needs {needed:,} B of shared memory of {limit:,} B; {used}",
        {"needed": needed, "limit": limit},
    )
    return Clamped(tile, fitting, reason)


def _smaller(tile: GemmTile) -> Iterator[GemmTile]:
    m, n = tile.m, tile.n
    while True:
        k = tile.k
        while True:
            for stages in range(tile.stages, min(tile.stages, MIN_STAGES) - 1, -1):
                yield GemmTile(m, n, k, stages)
            if k // 2 < MIN_K:
                break
            k //= 2
        if max(m, n) // 2 < MIN_SIDE:
            return
        m, n = (m // 2, n) if m >= n else (m, n // 2)


def _text(tile: GemmTile) -> str:
    return f"{tile.m}x{tile.n}x{tile.k} in {tile.stages} stages"


@dataclass(frozen=True, slots=True)
class Padded:
    """`value` runs in the instantiation `size`, or (None) in none; `message` says so."""

    value: int
    size: int | None
    message: str

    @property
    def wasted(self) -> float:
        """Part of the work that is padding, 0 .. 1."""
        return 0.0 if not self.size else 1 - self.value / self.size


def pad_to_instantiation(name: str, value: int, sizes: Iterable[int]) -> Padded:
    """The smallest instantiation that holds `value`; only where padding is semantically neutral."""
    listed: Sequence[int] = sorted(set(sizes))
    size = next((size for size in listed if size >= value), None)
    if size is None or value < 1:
        nearest = ", ".join(map(str, listed)) or "none"
        return Padded(value, None, f"no instantiation for {name} {value}; there is: {nearest}")
    if size == value:
        return Padded(value, size, f"{name} {value} is instantiated")
    waste = 100 * (1 - value / size)
    return Padded(value, size, f"{name} {value} padded to {size}, {waste:.0f} % wasted")
