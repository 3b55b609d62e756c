"""Calls of the indexer's kernels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.kv.book.form import EntryForm
from metainfer.kv.store.entries import EntryPages
from metainfer.ops.indexer import triton as kernels
from metainfer.ops.indexer import triton_query, triton_select
from metainfer.ops.indexer.tiles import (
    GROUP,
    LINE,
    SELECT_REGISTERS,
    STREAM,
    WORKSPACE,
    Tile,
    kept_groups,
    padded_heads,
    query_block,
    query_heads,
    rows_at_once,
    score_tile,
    select_lanes,
    select_warps,
    splits_for,
)
from metainfer.ops.launch import ceil_div, prepared

query_kernel = prepared(triton_query.query_kernel)
score_kernel, score_one_kernel = prepared(kernels.score_kernel), prepared(kernels.score_one_kernel)
select_kernel = prepared(triton_select.select_kernel)

#: Layout id -> how the kernels know it: bits of a stored element, 0 for the model's own type.
BITS = {"index@1": 0, "index-fp8@1": 8, "index-fp4@1": 4}


@cache
def _card(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, shared bytes of one); the interpreter's host stands for a small card."""
    if device.type != "cuda":
        return 2, 0
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, facts.shared_memory_per_multiprocessor


def _levels(capacity: int, lanes: int) -> int:
    """How often groups are chosen, at most, before the entries of rows that may see `capacity`."""
    return int(capacity > lanes) + int(capacity // GROUP > lanes)


def index_query(
    q: Tensor, positions: Tensor, cos_sin: Tensor, form: EntryForm, *, heads_each: int = 0
) -> Tensor:
    """See `ref.index_query`; d is a power of two up to 256. One launch."""
    q = q.contiguous()
    rows, heads, d = q.shape
    out = torch.empty_like(q)
    if q.numel():
        few = heads_each or query_heads(rows)
        query_kernel[(rows * ceil_div(heads, few),)](
            q, positions, cos_sin, out, heads, d, cos_sin.shape[1], few, BITS[form.layout],
            form.group, form.hadamard, num_warps=4,
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
    lanes: int = 0,
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
    alone, bits, (units, shared) = rows <= sequences, BITS[form.layout], _card(device)
    tile = tile or (STREAM if alone else score_tile(shared, heads, d, q.element_size()))
    visible = page_table.shape[1] * pages.entries
    scored, room = visible > top_k, ceil_div(visible, LINE)
    capacity = LINE * room
    tiles = capacity // tile.n
    many = rows_at_once(rows, capacity, top_k, workspace) if scored else rows
    block = 1 if alone else query_block(many, sequences, tiles, units)
    many = many // block * block
    lanes = lanes or select_lanes(capacity, top_k)
    keep = kept_groups(lanes, top_k)
    scores = largest = greatest = lists = out
    if scored:
        sizes = (capacity, capacity // GROUP, capacity // GROUP**2, 2 * keep)
        held = torch.empty(sum(sizes) * many, dtype=torch.int32, device=device)
        scores, largest, greatest, lists = torch.split(held, [size * many for size in sizes])
    common = (
        ratio, top_k, scale, g.stride(0), page_table.stride(0), room, pages.data.stride(0), heads,
        padded_heads(heads), d, tile.n, pages.entries, bits, form.group, GROUP,
        _levels(capacity, lanes), q.dtype == torch.float32, tile.channels(d, form.group, bits),
    )  # fmt: skip
    for first in range(0, rows, many):
        last = min(first + many, rows)
        inputs = (
            q, g, pages.data, page_table, positions, query_start, scores, largest, greatest,
            sequences,
        )  # fmt: skip
        if scored:
            blocks = ceil_div(last - first, block)
            grid = (blocks, splits or splits_for(blocks, tiles, units))
            how = {"num_warps": tile.warps, "num_stages": tile.stages}
            if tile.registers:
                how["maxnreg"] = tile.registers
            if alone:
                score_one_kernel[grid](*inputs, first, *common, **how)
            else:
                score_kernel[grid](*inputs, first, last, block, *common, **how)
        select_kernel[(last - first,)](
            scores, largest, greatest, lists, positions, query_start, out, sequences, first, ratio,
            top_k, room, keep, GROUP, lanes, num_warps=select_warps(lanes),
            maxnreg=SELECT_REGISTERS,
        )  # fmt: skip
    return out
