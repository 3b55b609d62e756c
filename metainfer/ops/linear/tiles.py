"""Tile sizes of the FP8 products, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128
"""Channels that share one activation scale, and the side of a weight block."""

STREAM_ROWS = 32
"""Most tokens of the weight-streaming form."""


@dataclass(frozen=True, slots=True)
class StreamTile:
    """`n` rows of the weight per program, streamed 128 channels at a time. `early`: programs come
    before the kernel in front has ended and ask for their weights (9.0 and newer)."""

    n: int
    warps: int
    stages: int
    early: bool = False

    def shared_bytes(self, rows: int, wide: bool = False) -> int:
        """Upper estimate: weight and activation buffers, and one quantised activation tile.

        `wide`: operands are multiplied in bfloat16, the weight's on their way through scratch.
        """
        more = (2 * self.n + rows) * BLOCK if wide else 0
        return self.stages * (self.n + 2 * rows) * BLOCK + rows * BLOCK + more + 1024


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """`m` tokens by `n` weight rows, 128 channels a step; `group` row blocks share weights.

    `tma`: operands arrive by the bulk copy engine (9.0 and newer). `registers`: a cap, 0 for none.
    """

    m: int
    n: int
    warps: int
    stages: int
    tma: bool = False
    registers: int = 0
    group: int = 8

    def shared_bytes(self) -> int:
        """Upper estimate: operand buffers, or the output tile's way to memory."""
        return max(self.stages * (self.m + self.n) * BLOCK, self.m * self.n * 4) + 1024

    def wide_bytes(self, capability: tuple[int, int] | None) -> int:
        """The same where activations come as bfloat16 and weights become it on the way.

        9.x keeps one buffer more and multiplies from shared memory; others decode in registers.
        """
        hopper = capability is not None and capability[0] == 9
        buffers = self.stages if hopper else self.stages - 1
        step = (2 * self.m + self.n) * BLOCK
        scratch = 2 * self.n * BLOCK if hopper else 0
        return max(buffers * step + scratch, self.m * self.n * 4) + 1024


STREAM = StreamTile(n=128, warps=8, stages=4)
STREAM_WIDE = StreamTile(n=128, warps=4, stages=3)  # more than 16 tokens
STREAM_SMALL = StreamTile(n=64, warps=4, stages=4)  # shared memory of 101,376 B
STREAM_SMALL_WIDE = StreamTile(n=64, warps=4, stages=3)
CHUNK_WGMMA = ChunkTile(m=64, n=128, warps=4, stages=3, tma=True, group=32)
CHUNK = ChunkTile(m=128, n=128, warps=8, stages=3)
CHUNK_WIDE = ChunkTile(m=128, n=128, warps=8, stages=3)
"""In bfloat16."""


def stream_for(capability: tuple[int, int] | None, rows: int) -> StreamTile:
    """The streaming tile of a card."""
    if capability is not None and capability[0] == 9:
        return STREAM if rows <= 16 else STREAM_WIDE
    return STREAM_SMALL if rows <= 16 else STREAM_SMALL_WIDE


def has_e4m3(capability: tuple[int, int] | None) -> bool:
    """Whether compilers have the type for the card; the interpreter's host has it."""
    return capability is None or capability >= (8, 9)


def chunk_for(capability: tuple[int, int] | None, wide: bool = False) -> ChunkTile:
    """The tile for many tokens; `wide`: in bfloat16."""
    if wide:
        return CHUNK_WIDE
    return CHUNK_WGMMA if capability is not None and capability[0] == 9 else CHUNK


def k_splits(tiles: int, k: int, units: int) -> int:
    """Into how many parts K is cut: about two programs per multiprocessor, two blocks each.

    A divisor of the number of blocks, so that every part is as long.
    """
    blocks = k // BLOCK
    best = 1
    for parts in range(1, blocks // 2 + 1):
        if blocks % parts == 0 and tiles * parts <= 2 * units:
            best = parts
    return best
