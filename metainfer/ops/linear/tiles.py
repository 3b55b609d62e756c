"""Tile sizes of the FP8 products, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128
"""Channels that share one activation scale, and the side of a weight block."""

STREAM_ROWS = 32
"""Most tokens of the weight-streaming form."""


@dataclass(frozen=True, slots=True)
class StreamTile:
    """`n` rows of the weight per program, streamed 128 channels at a time.

    `early`: programs come before the kernel in front has ended and ask for so many blocks of their
    weights (9.0 and newer, a power of two); 0: they do not.
    """

    n: int
    warps: int
    stages: int
    early: int = 0

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


STREAM = StreamTile(n=128, warps=4, stages=4, early=1)
STREAM_SHORT = StreamTile(n=128, warps=8, stages=4, early=2)  # a small matrix
STREAM_WIDE = StreamTile(n=128, warps=4, stages=3)  # more than 16 tokens
STREAM_SHORT_WIDE = StreamTile(n=64, warps=4, stages=4)
STREAM_SMALL = StreamTile(n=64, warps=4, stages=4)  # shared memory of 101,376 B
STREAM_SMALL_WIDE = StreamTile(n=64, warps=4, stages=3)
CHUNK_WGMMA = ChunkTile(m=64, n=128, warps=4, stages=3, tma=True, group=32)
CHUNK = ChunkTile(m=128, n=128, warps=8, stages=3)
CHUNK_WIDE = ChunkTile(m=128, n=128, warps=8, stages=3)
"""In bfloat16."""
CHUNK_FEW_WGMMA = ChunkTile(m=64, n=64, warps=4, stages=4, tma=True, group=32)
CHUNK_FEW = ChunkTile(m=64, n=64, warps=4, stages=3)
FEW_ROWS = 128
"""Tokens up to which tiles are small, so that there are enough of them."""
SMALL = 1 << 23
"""Fewer elements are a small matrix: cut into many short parts."""


def stream_for(capability: tuple[int, int] | None, rows: int, size: int = SMALL) -> StreamTile:
    """The streaming tile of a card for a matrix of `size` elements.

    Beyond 16 tokens programs do not come early: a product alone gains by it, a step of 32 tokens
    does not (docs/log.md).
    """
    if capability is not None and capability[0] == 9:
        if rows > 16:
            return STREAM_SHORT_WIDE if size <= SMALL else STREAM_WIDE
        return STREAM if size >= SMALL else STREAM_SHORT
    return STREAM_SMALL if rows <= 16 else STREAM_SMALL_WIDE


def has_e4m3(capability: tuple[int, int] | None) -> bool:
    """Whether compilers have the type for the card; the interpreter's host has it."""
    return capability is None or capability >= (8, 9)


def chunk_for(
    capability: tuple[int, int] | None, wide: bool = False, rows: int = FEW_ROWS + 1
) -> ChunkTile:
    """The tile for more tokens than are streamed; `wide`: in bfloat16."""
    hopper = capability is not None and capability[0] == 9 and not wide
    if rows <= FEW_ROWS:
        return CHUNK_FEW_WGMMA if hopper else CHUNK_FEW
    if wide:
        return CHUNK_WIDE
    return CHUNK_WGMMA if hopper else CHUNK


def stream_splits(tiles: int, k: int, units: int) -> int:
    """Into how many parts K is cut: about two programs per multiprocessor, two blocks each."""
    return _parts(tiles, k // BLOCK, 2 * units, k // BLOCK // 2)


def chunk_splits(tiles: int, k: int, units: int) -> int:
    """As `stream_splits`: four parts of eight blocks, since one program adds what the others left,
    at about 1.5 µs a part."""
    return _parts(tiles, k // BLOCK, 2 * units, min(4, k // BLOCK // 8))


def _parts(tiles: int, blocks: int, programs: int, most: int) -> int:
    """The largest divisor of `blocks` within both bounds, so that every part is as long."""
    fitting = (p for p in range(1, most + 1) if blocks % p == 0 and tiles * p <= programs)
    return max(fitting, default=1)


FOREIGN_SMALLEST = 128
"""Rows of a library's smallest size; the others are 2^i and 3 x 2^i times 64."""


def foreign_rows(rows: int) -> tuple[int, ...]:
    """All sizes that rows are padded to for a library, up to the first that holds `rows`."""
    found = [FOREIGN_SMALLEST]
    while found[-1] < rows:
        whole = found[-1] & (found[-1] - 1) == 0
        found.append(found[-1] * 3 // 2 if whole else found[-1] * 4 // 3)
    return tuple(found)
