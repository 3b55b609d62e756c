"""Sizes of the indexer's kernels, read by kernels, declarations and audit. No torch."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 8
"""Entries of which the scoring kernels keep the largest score, so that few need a second look."""

LINE = 512
"""A row's workspace is for a multiple of so many entries: groups of groups come by groups, too."""

WORKSPACE = 64 << 20
"""Most bytes of scores and group maxima alive at once: longer steps are cut into parts by rows.
Part of what a step may hold beside its activations (field case B-19)."""

HALF_BYTE_CHANNELS = 64
"""Fewest channels of a product by keys of half bytes: for `mma.sync` Triton orders them in units of
64, and releases up to 3.7, at least, multiply a quarter of one wrongly. Missing ones are zeros."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Scores: `n` entries (a multiple of 64) by all heads of one query, `stages` of what passes on
    their way. Keys are decoded in `parts` of their channels; `registers`: a cap, 0 for none."""

    n: int
    warps: int
    stages: int
    parts: int = 1
    registers: int = 0

    def shared_bytes(self, heads: int, d: int, element: int) -> int:
        """At most: keys, queries on their way, and a score each on its way to its writer."""
        return (self.n + self.stages * padded_heads(heads)) * d * element + 4 * self.n

    def channels(self, d: int, group: int, bits: int) -> int:
        """Channels decoded at once: whole groups that share a scale. `bits` of a stored element,
        0 for the model's own type."""
        each = d // self.parts if d // self.parts >= max(group, 16) else d
        return max(each, HALF_BYTE_CHANNELS) if bits == 4 else each


SCORE = Tile(n=128, warps=8, stages=2)
"""Many queries of a sequence: a tile of keys stays while they pass."""

WIDE_SCORE = Tile(n=256, warps=8, stages=3, parts=2, registers=128)
"""The same where two programs of it share a multiprocessor: queries are read half as often."""

STREAM = Tile(n=64, warps=4, stages=4)
"""One query a sequence: it stays while tiles of keys pass."""

QUERY_BLOCKS = (16, 32, 64)
"""Queries of one sequence that may share a tile of keys."""


def score_tile(shared: int, heads: int, d: int, element: int) -> Tile:
    """Where a multiprocessor has `shared` bytes, of which each program costs another 1,024."""
    if 2 * (WIDE_SCORE.shared_bytes(heads, d, element) + 1024) > shared:
        return SCORE
    return WIDE_SCORE


def padded_heads(heads: int) -> int:
    """Heads as the matrix product takes them: a power of two, at least 16."""
    return max(16, 1 << (heads - 1).bit_length())


def query_heads(rows: int) -> int:
    """Heads of a token that one program turns: few tokens are spread over more programs."""
    return 8 if rows <= 64 else 32


def query_block(rows: int, sequences: int, tiles: int, units: int) -> int:
    """Queries that share a tile of keys, by the average of a sequence: as many as leave four
    programs a unit."""
    most = -(-rows // sequences)
    block = min(most, QUERY_BLOCKS[0], rows)
    for wider in QUERY_BLOCKS[1:]:
        if wider <= most and -(-rows // wider) * tiles >= 4 * units:
            block = wider
    return block


def select_lanes(capacity: int, top_k: int) -> int:
    """Scores that the selecting program of a row holds at once: of twice the groups it is after, so
    that their search ends early."""
    return min(max(1 << (capacity - 1).bit_length(), 2048), max(2048, 2 * GROUP * top_k), 16384)


SELECT_REGISTERS = 128
"""A cap for the selecting programs, so that two of 8 warps share a multiprocessor."""


def select_warps(lanes: int) -> int:
    """32 scores a thread."""
    return max(4, lanes // 1024)


def kept_groups(lanes: int, top_k: int) -> int:
    """Groups that a row may choose of those before them."""
    return max(lanes // GROUP, top_k)


def row_bytes(capacity: int, top_k: int) -> int:
    """Workspace of one row that may see `capacity` entries: a score each, a maximum for each group
    and for each group of those, the groups chosen of either."""
    lists = 2 * kept_groups(select_lanes(capacity, top_k), top_k)
    return 4 * (capacity + capacity // GROUP + capacity // GROUP**2 + lists)


def rows_at_once(rows: int, capacity: int, top_k: int, limit: int = WORKSPACE) -> int:
    """Rows that `limit` bytes serve together; one row always runs."""
    return max(min(rows, limit // row_bytes(capacity, top_k)), 1)


def splits_for(blocks: int, tiles: int, units: int) -> int:
    """Programs that share the keys of a block of rows, each as many tiles as the others: from
    shapes alone, at most about four a unit."""
    each = -(-tiles * blocks // (4 * units))
    return -(-tiles // max(each, 1))
