"""Sizes of the indexer's kernels, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 32
"""Entries of which the scoring kernel keeps the largest score, so that few need a second look."""

WORKSPACE = 64 << 20
"""Most bytes of scores and group maxima alive at once: longer steps are cut into parts by rows.
Part of what a step may hold beside its activations (field case B-19)."""

SELECT_LANES = 2048
"""Scores that the selecting kernel looks at in one go."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Scores: `n` entries by all heads of one query, `stages` queries on their way."""

    n: int
    warps: int
    stages: int

    def shared_bytes(self, heads: int, d: int, element: int) -> int:
        """Upper estimate: keys, queries on their way, and the sums' way between warps."""
        return (self.n * d + self.stages * padded_heads(heads) * d) * element + 8 * self.n + 4096


SCORE = Tile(n=128, warps=4, stages=3)
SCORE_SCALED = Tile(n=128, warps=8, stages=3)  # decoding keys takes registers

QUERY_ROWS = 32
"""Index query vectors that one program turns."""

QUERY_BLOCK = 16
"""Queries of one sequence that share a tile of keys, in steps of many tokens."""


def tile_for(scaled: bool) -> Tile:
    """The tile of keys in the model's type, or of a scaled form."""
    return SCORE_SCALED if scaled else SCORE


def padded_heads(heads: int) -> int:
    """Heads as the matrix product takes them: a power of two, at least 16."""
    return max(16, 1 << (heads - 1).bit_length())


def row_bytes(capacity: int, top_k: int) -> int:
    """Workspace of one row that may see `capacity` entries: a score each, a maximum for each group,
    the groups chosen."""
    return 4 * (capacity + capacity // GROUP + top_k)


def rows_at_once(rows: int, capacity: int, top_k: int, limit: int = WORKSPACE) -> int:
    """Rows that `limit` bytes serve together; one row always runs."""
    return max(min(rows, limit // row_bytes(capacity, top_k)), 1)


def splits_for(blocks: int, tiles: int, units: int) -> int:
    """Programs that share the keys of a block of rows: from shapes alone, about four a unit."""
    return max(1, min(tiles, -(-4 * units // max(blocks, 1))))
