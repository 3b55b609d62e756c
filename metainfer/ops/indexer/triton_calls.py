"""Calls of the indexer's kernels."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.kv.book.form import EntryForm
from metainfer.kv.store.entries import EntryPages
from metainfer.ops.indexer.tiles import (
    GROUP,
    QUERY_BLOCK,
    QUERY_ROWS,
    SELECT_LANES,
    WORKSPACE,
    Tile,
    padded_heads,
    rows_at_once,
    splits_for,
    tile_for,
)
from metainfer.ops.indexer.triton import query_kernel, score_kernel, select_kernel

#: Layout id -> how the kernels know it: bits of a stored element, 0 for the model's own type.
BITS = {"index@1": 0, "index-fp8@1": 8, "index-fp4@1": 4}


@cache
def _units(device: torch.device) -> int:
    """Multiprocessors; the interpreter's host stands for a small card."""
    if device.type != "cuda":
        return 2
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def index_query(q: Tensor, positions: Tensor, cos_sin: Tensor, form: EntryForm) -> Tensor:
    """See `ref.index_query`; d is a power of two up to 256. One launch."""
    q = q.contiguous()
    rows, heads, d = q.shape
    out = torch.empty_like(q)
    if q.numel():
        query_kernel[(triton.cdiv(rows * heads, QUERY_ROWS),)](
            q, positions, cos_sin, out, rows * heads, heads, d, cos_sin.shape[1], QUERY_ROWS,
            BITS[form.layout], form.group, form.hadamard, q.dtype == torch.float32, num_warps=4,
        )  # fmt: skip
    return out


def index_select(
    q: Tensor,
    g: Tensor,
    pages: EntryPages,
    page_table: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    ratio: int,
    top_k: int,
    scale: float,
    tile: Tile | None = None,
    splits: int = 0,
    workspace: int = WORKSPACE,
) -> Tensor:
    """See `ref.index_select`; equal to it in any cut. Two launches for each part of the rows, one
    where the page table has no room for more than `top_k` entries.

    Cuts follow from shapes (rows, sequences, the table's width), never from lengths, so a captured
    step serves every length. q is contiguous, g may be a slice of wider rows.
    """
    if not q.is_contiguous() or (g.stride(1) != 1 and g.shape[1] > 1):
        raise InternalError(f"the indexer wants packed heads, got {q.stride()} and {g.stride()}")
    (rows, heads, d), device = q.shape, q.device
    sequences, form = context_lens.shape[0], pages.form
    out = torch.empty((rows, top_k), dtype=torch.int32, device=device)
    if rows == 0 or sequences == 0:
        return out.fill_(-1)
    tile = tile or tile_for(form.scale != "none")
    capacity = triton.cdiv(page_table.shape[1] * pages.entries, tile.n) * tile.n
    scored = capacity > top_k
    many = rows_at_once(rows, capacity, top_k, workspace) if scored else rows
    block = min(QUERY_BLOCK, triton.cdiv(rows, sequences))
    numbers = out
    if scored:
        numbers = torch.empty(
            (capacity + capacity // GROUP + top_k) * many, dtype=torch.int32, device=device
        )
    largest = numbers[capacity * many :]
    groups = largest[capacity // GROUP * many :]
    for first in range(0, rows, many):
        last = min(first + many, rows)
        if scored:
            blocks = triton.cdiv(last - first, block)
            parts = splits or splits_for(blocks, capacity // tile.n, _units(device))
            score_kernel[(blocks, parts)](
                q, g, pages.data, page_table, positions, query_start, numbers, largest, sequences,
                first, last, block, ratio, top_k, scale, g.stride(0), page_table.stride(0),
                capacity, pages.data.stride(0), heads, padded_heads(heads), d, tile.n,
                pages.entries, BITS[form.layout], form.group, GROUP, q.dtype == torch.float32,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        select_kernel[(last - first,)](
            numbers, largest, groups, positions, query_start, out, sequences, first, ratio, top_k,
            capacity, GROUP, SELECT_LANES, num_warps=8,
        )  # fmt: skip
    return out
