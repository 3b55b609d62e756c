"""What a chunk's call copies of the caches that it reads, at most, for the memory ledger. No torch.

`rows` and `seqs` of a request are those of the largest chunk, `context` the longest that it meets.
"""

from __future__ import annotations

from metainfer.kernels.cost import extent, width
from metainfer.kernels.impl import Context
from metainfer.ops.attn_sparse.tiles import HELD_BYTES

HELD = 1 << 26
"""Elements of a sequence's entries that the torch form holds decoded at once."""
SPARE_PAGES = 5
"""Pages of a sequence's window that are copied beside the window and its own tokens."""


def entries_of(c: Context) -> tuple[int, int]:
    """Compressed entries of a sequence, and of them per query."""
    ratio, context, top = extent(c, "ratio", 0), extent(c, "context", 1024), extent(c, "top_k", 0)
    kept = context // ratio if ratio else 0
    return kept, min(top, kept) if top else kept


def decoded(c: Context) -> int:
    """Scaled latents decoded once for all queries, where that pays (`tiles.decodes_first`)."""
    (kept, listed), (rows, seqs) = entries_of(c), (extent(c, "rows"), extent(c, "seqs"))
    window, each = extent(c, "window", 128), extent(c, "d") * width(c)
    page = extent(c, "page", 64) * max(extent(c, "ratio", 0), 1)
    entries = min(seqs * kept, rows * (window + listed) // 2) * each
    near = rows + seqs * (window + SPARE_PAGES * page)
    return min(entries, HELD_BYTES) + near * each


def gathered(c: Context) -> int:
    """Of one sequence at a time: its window, and its entries while they are few."""
    elements = min(entries_of(c)[0] * extent(c, "d"), HELD)
    near = extent(c, "rows") + extent(c, "window", 128)
    return (elements + near * extent(c, "d")) * width(c)


def joined(c: Context) -> int:
    """Windows and all pages of entries as one matrix, while its two parts stand beside it."""
    near = extent(c, "rows") + extent(c, "seqs") * extent(c, "window", 128)
    latents = near + extent(c, "seqs") * entries_of(c)[0]
    return 2 * latents * extent(c, "d") * width(c)
