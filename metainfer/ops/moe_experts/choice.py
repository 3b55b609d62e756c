"""Which tile a call of the MXFP4 expert products takes. No torch."""

from __future__ import annotations

from metainfer.ops.moe_experts.tiles import (
    BLOCK,
    PORTABLE_CHUNK,
    PORTABLE_STREAM,
    WGMMA_CHUNK,
    WGMMA_MANY,
    WGMMA_MIDDLE,
    WGMMA_SOME,
    WGMMA_STREAM,
    PipelinedTile,
    TableTile,
)


def wgmma_for(pairs: int, experts: int, d: int, f: int) -> TableTile:
    """The Hopper form's tile, by the pairs that an expert gets on average.

    Of ranks that share the experts each counts all pairs, and so too many for those it holds.
    Narrow experts, and those whose scales do not come by fours, take the forms for any width.
    """
    if pairs > 80 * experts:  # most take two tiles of 64, and one of 128 costs less
        return WGMMA_MANY
    narrow = min(d, f) < 8 * BLOCK or d % (4 * BLOCK) or f % (4 * BLOCK)
    if pairs <= 8 * experts and not narrow:
        return WGMMA_STREAM
    if pairs <= 16 * experts:
        return WGMMA_SOME
    if pairs <= 28 * experts:  # few take two tiles of 32
        return WGMMA_MIDDLE
    return WGMMA_MANY if narrow else WGMMA_CHUNK


def portable_for(pairs: int, experts: int) -> PipelinedTile:
    """The tile of every card with e4m3, at any width."""
    return PORTABLE_STREAM if pairs <= 8 * experts else PORTABLE_CHUNK
