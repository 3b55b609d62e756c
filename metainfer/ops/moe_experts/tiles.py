"""Tile sizes of the MXFP4 expert products, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.errors import InternalError

BLOCK = 128
"""Channels of one step: one activation scale, four weight scales."""

FEW_SLOTS = 256
"""Most (token, choice) pairs of the streaming form, which finds its rows without a sort."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`n` weight rows by `m` tokens, 128 channels a step."""

    n: int
    m: int
    warps: int
    stages: int

    def shared_bytes(self, wide: bool = False) -> int:
        """Upper estimate: packed weights, scales and activations, unpacked weights.

        `wide`: activations come, and weights are unpacked, as bfloat16.
        """
        size = 2 * BLOCK if wide else BLOCK
        streamed = self.stages * (self.n * (BLOCK // 2 + 4) + self.m * (size + 4))
        unpacked = self.n * size if wide else (self.m + self.n) * size
        return max(streamed + unpacked, self.n * self.m * 4) + 2048


@dataclass(frozen=True, slots=True)
class WgmmaTile:
    """Of the Hopper form: `n` weight rows by `m` pairs, `blocks` of 128 channels a stage.

    Scales come for four blocks at once, so `blocks` divides four; of two such fours there is room,
    so that at most four blocks are copied ahead. Raises InternalError for others.
    """

    n: int
    m: int
    warps: int
    stages: int
    blocks: int = 1

    def __post_init__(self) -> None:
        if 4 % self.blocks or (self.stages - 1) * self.blocks > 4:
            raise InternalError(f"{self} copies past the scales that it has room for")

    def shared_bytes(self) -> int:
        """Rings of packed weights, their scales, activations and theirs."""
        stage = self.blocks * (self.n * BLOCK // 2 + self.m * BLOCK)
        return self.stages * stage + 2 * 16 * (self.n + self.m)


@dataclass(frozen=True, slots=True)
class PipelinedTile:
    """Of the form that unpacks beside its products: `n` weight rows by up to `m` pairs.

    A block of up to `least` pairs takes a tile of as many; `ring` blocks of 128 channels are held,
    4 or 8. `wgmma`: Hopper's products, or else those of every card with e4m3.
    """

    n: int
    m: int
    least: int
    warps: int
    ring: int = 4
    wgmma: bool = True

    def shared_bytes(self) -> int:
        """Rings of packed weights, activations and the scales of both."""
        block = self.n * BLOCK // 2 + self.m * BLOCK
        return self.ring * block + self.ring // 2 * 16 * (self.n + self.m)


TableTile = WgmmaTile | PipelinedTile
"""Tiles whose products read a table of blocks."""

WGMMA_STREAM = WgmmaTile(n=64, m=8, warps=4, stages=3, blocks=2)
WGMMA_CHUNK = WgmmaTile(n=128, m=64, warps=4, stages=4)
WGMMA_SOME = PipelinedTile(n=64, m=16, least=8, warps=4, ring=8)
WGMMA_MIDDLE = PipelinedTile(n=64, m=32, least=32, warps=4, ring=8)
WGMMA_MANY = PipelinedTile(n=128, m=128, least=64, warps=8)
WGMMA_TILES = (WGMMA_STREAM, WGMMA_SOME, WGMMA_MIDDLE, WGMMA_CHUNK, WGMMA_MANY)
PORTABLE_STREAM = PipelinedTile(n=64, m=8, least=8, warps=4, wgmma=False)
PORTABLE_CHUNK = PipelinedTile(n=128, m=64, least=32, warps=8, wgmma=False)
STREAM_WGMMA = Tile(n=128, m=16, warps=4, stages=4)
STREAM = Tile(n=64, m=8, warps=4, stages=4)
CHUNK_WGMMA = Tile(n=128, m=128, warps=8, stages=3)
CHUNK = Tile(n=128, m=64, warps=8, stages=3)
STREAM_WIDE = Tile(n=64, m=16, warps=4, stages=3)  # products in bfloat16
CHUNK_WIDE = Tile(n=64, m=64, warps=8, stages=2)


def stream_for(capability: tuple[int, int] | None, wide: bool = False) -> Tile:
    """The tile for few tokens; `wide`: in bfloat16."""
    if wide:
        return STREAM_WIDE
    return STREAM_WGMMA if capability is not None and capability[0] == 9 else STREAM


def chunk_for(capability: tuple[int, int] | None, wide: bool = False) -> Tile:
    """The tile for many tokens; `wide`: in bfloat16."""
    if wide:
        return CHUNK_WIDE
    return CHUNK_WGMMA if capability is not None and capability[0] == 9 else CHUNK


# PTX that unpacks sixteen e2m1 elements of one scale group to e4m3. Inputs: two registers of packed
# elements, the four scale bytes of a block of 128 channels, the row's reference scale, and which of
# the four applies (a byte selector). The eight magnitudes times 2^(scale - reference + 6) are two
# registers; a byte permute looks four elements up at once, another spreads their signs. Output i
# holds elements 4 i .. 4 i + 3.
SPAN = 11
"""Largest difference of the scale exponents in a row that e4m3 holds exactly."""

UNPACK = """
{
.reg .b32 s, lo, hi, t, u, p;
prmt.b32 s, $6, 0, $14;
sub.s32 s, s, $10;
mad.lo.s32 lo, s, 0x08080800, 0x6C686000;
mad.lo.s32 hi, s, 0x08080808, 0x7C787470;
and.b32 t, $4, 0x77777777;
shl.b32 u, $4, 4;
prmt.b32 p, u, $4, 0xD9C8;
and.b32 p, p, 0x80808080;
prmt.b32 s, lo, hi, t;
or.b32 $0, s, p;
shr.u32 t, t, 16;
prmt.b32 p, u, $4, 0xFBEA;
and.b32 p, p, 0x80808080;
prmt.b32 s, lo, hi, t;
or.b32 $1, s, p;
and.b32 t, $5, 0x77777777;
shl.b32 u, $5, 4;
prmt.b32 p, u, $5, 0xD9C8;
and.b32 p, p, 0x80808080;
prmt.b32 s, lo, hi, t;
or.b32 $2, s, p;
shr.u32 t, t, 16;
prmt.b32 p, u, $5, 0xFBEA;
and.b32 p, p, 0x80808080;
prmt.b32 s, lo, hi, t;
or.b32 $3, s, p;
}
"""
OPERANDS = "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r"

# The same on int32 elements, eight nibbles each, two a time: the outputs of two int32 tensors.
UNPACK_WORDS = UNPACK.replace("$10", "$8").replace("$14", "$10")
OPERANDS_WORDS = "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r"
