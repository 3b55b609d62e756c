"""Calls of the sparse attention kernels."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.kv.book.form import plain
from metainfer.kv.store.entries import EntryPages
from metainfer.ops.attn_sparse import triton as kernels
from metainfer.ops.attn_sparse import triton_decoded, triton_sliced, triton_wgmma
from metainfer.ops.attn_sparse.tiles import (
    HopperTile,
    Tile,
    decodes_first,
    hopper_for,
    splits_for,
    tile_for,
)
from metainfer.ops.launch import ceil_div, power_of_2, prepared
from metainfer.ops.linear.tiles import has_e4m3
from metainfer.ops.strides import heads_packed

pages_kernel = prepared(triton_decoded.pages_kernel)
places_kernel = prepared(kernels.places_kernel)
sparse_kernel, merge_kernel = prepared(kernels.sparse_kernel), prepared(kernels.merge_kernel)
sliced_kernel = prepared(triton_sliced.sliced_kernel)
hopper_kernel = prepared(triton_wgmma.sparse_kernel)

LOG2E = 1.4426950408889634


@cache
def _card(device: torch.device) -> tuple[tuple[int, int] | None, int]:
    """(capability, multiprocessors); the interpreter's host stands for a small card."""
    if device.type != "cuda":
        return None, 4
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), found.multi_processor_count


def attn_sparse_scaled(
    q: Tensor,
    local: EntryPages,
    local_table: Tensor,
    entries: EntryPages | None,
    entry_table: Tensor | None,
    selected: Tensor | None,
    sinks: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int,
    ratio: int,
    native: bool | None = None,
    hopper: bool = False,
) -> Tensor:
    """`attn_sparse` over ``latent-fp8@1``, in two forms. Which one follows from shapes alone
    (`tiles.decodes_first`): each query decodes its keys, or they are decoded once for all.

    `native`: by the card's own e4m3, where it has the type; else by integers. `hopper`: in the
    Hopper form.
    """
    if native is None:
        native = has_e4m3(_card(q.device)[0])
    kept = listed = 0
    if entries is not None and entry_table is not None and ratio > 0:
        kept = entry_table.shape[1] * entries.entries
        listed = kept if selected is None else selected.shape[1]
    sequences, d = local_table.shape[0], q.shape[2]
    if decodes_first(q.shape[0], sequences, window, listed, kept, d):
        span = (positions, query_start, context_lens, q.dtype)
        local, local_table = decoded(local, local_table, *span, window=window, native=native)
        if entries is not None and entry_table is not None and ratio > 0:
            entries, entry_table = decoded(entries, entry_table, *span, ratio=ratio, native=native)
    return attn_sparse(
        q, local, local_table, entries, entry_table, selected, sinks, cos_sin, positions,
        query_start, context_lens, scale=scale, window=window, ratio=ratio, native=native,
        hopper=hopper,
    )  # fmt: skip


def decoded(
    pages: EntryPages,
    table: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    dtype: torch.dtype,
    *,
    window: int = 0,
    ratio: int = 1,
    native: bool = True,
) -> tuple[EntryPages, Tensor]:
    """The pages of ``latent-fp8@1`` that a call can read as plain pages [P', n, D], and a table
    [S, W] that leads to them.

    `window` > 0: tokens that some query's window reaches; else every visible entry of `ratio`
    tokens. Other places of the new table are -1.
    """
    (sequences, width), rows = table.shape, positions.shape[0]
    form, n = pages.form, pages.entries
    spare = window // n + 4  # a part's first and last page may be cut, and the one before
    count = rows // n + 1 + sequences * spare if window else sequences * width
    held = torch.empty((count, n, form.width), dtype=dtype, device=table.device)
    held_table = torch.empty((sequences, width), dtype=torch.int32, device=table.device)
    pages_kernel[(sequences, width)](
        pages.data, table, positions, query_start, context_lens, held, held_table, width,
        table.stride(0), window, ratio, spare, n, form.width, form.tail, form.width + form.tail,
        pages.data.stride(0), form.bytes - form.width - form.tail, 16,
        1 if native else 2, num_warps=8,
    )  # fmt: skip
    stored = str(dtype).removeprefix("torch.")
    return EntryPages(
        pages.group, held, plain("latent@1", form.width, stored, tail=form.tail), n
    ), held_table


class _Places(NamedTuple):
    """Where each query's keys begin: `at` and `scale_at` [rows, width] int64, `counts` [rows]."""

    at: Tensor
    scale_at: Tensor
    counts: Tensor
    width: int


def _located(
    local: EntryPages,
    local_table: Tensor,
    entries: EntryPages | None,
    entry_table: Tensor | None,
    selected: Tensor | None,
    positions: Tensor,
    query_start: Tensor,
    window: int,
    ratio: int,
    chained: bool,
) -> _Places:
    """The keys of every query, found once; in elements of the window's cache."""
    far, far_table, top, some = local, local_table, 0, False
    if entries is not None and entry_table is not None and ratio > 0:
        far, far_table, some = entries, entry_table, True
        top = 0 if selected is None else selected.shape[1]
    rows, device, form = positions.shape[0], positions.device, local.form
    width = window + (top or (far_table.shape[1] * far.entries if some else 0))
    scaled = form.scale != "none"
    at = torch.empty((rows, width), dtype=torch.int64, device=device)
    scale_at = torch.empty_like(at) if scaled else at
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    shift = (far.data.data_ptr() - local.data.data_ptr()) // local.data.element_size()
    # Never launched early: kernels behind it read q, which is whole once this one has begun.
    places_kernel[(rows, ceil_div(width, 1024))](
        local_table, far_table, selected if top else local_table, positions, query_start, at,
        scale_at, counts, query_start.shape[0] - 1, window, max(ratio, 1), local_table.stride(0),
        far_table.stride(0), shift, width, local.entries, far.entries, top,
        power_of_2(max(top, 1)), some, form.width + form.tail if scaled else form.width,
        local.data.stride(0) if scaled else 0, far.data.stride(0) if scaled else 0,
        form.bytes - form.width - form.tail if scaled else 0, 1024, chained, num_warps=4,
    )  # fmt: skip
    return _Places(at, scale_at, counts, width)


def attn_sparse(
    q: Tensor,
    local: EntryPages,
    local_table: Tensor,
    entries: EntryPages | None,
    entry_table: Tensor | None,
    selected: Tensor | None,
    sinks: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int,
    ratio: int,
    tile: Tile | HopperTile | None = None,
    splits: int = 0,
    native: bool = True,
    hopper: bool = False,
) -> Tensor:
    """See `ref.attn_sparse`; `selected` lists its entries first, then -1. D is a power of two.

    The number of parts follows from shapes alone (rows, table widths), never from lengths.
    `hopper`: by the tiles of `tiles.hopper_for`, and each launch begins while the one before ends.
    """
    if not heads_packed(q):
        raise InternalError(f"attention wants packed query heads, got strides {q.stride()}")
    (rows, heads, d), device = q.shape, q.device
    out = torch.empty((rows, heads, d), dtype=q.dtype, device=device)
    if rows == 0 or context_lens.shape[0] == 0:
        return out
    capability, units = _card(device)
    scaled = local.form.scale != "none"
    if tile is None:
        tile = hopper_for(rows, scaled) if hopper else tile_for(capability, scaled, d)
    block = min(tile.heads, max(16, power_of_2(heads)))
    blocks, rotated = ceil_div(heads, block), cos_sin.shape[1]
    places = _located(
        local, local_table, entries, entry_table, selected, positions, query_start, window, ratio,
        hopper,
    )  # fmt: skip
    splits = splits or splits_for(rows * blocks, -(-places.width // tile.n), units)
    parts = peaks = totals = out
    if splits > 1:
        parts = torch.empty((rows, heads, splits, d), dtype=torch.float32, device=device)
        peaks = torch.empty((rows, heads, splits), dtype=torch.float32, device=device)
        totals = torch.empty_like(peaks)
    if isinstance(tile, HopperTile):
        items = rows * blocks * splits
        programs = min(items, units) if tile.resident and splits == 1 else items
        hopper_kernel[(programs,)](
            q, local.data, places.at, places.counts, sinks, cos_sin, positions, out, parts, peaks,
            totals, scale * LOG2E, items, q.stride(0), places.width, heads, d, rotated, tile.heads,
            tile.n, splits, tile.warps, hopper, num_warps=tile.warps, launch_pdl=hopper,
        )  # fmt: skip
    elif tile.sliced:
        sliced_kernel[(rows, blocks, splits)](
            q, local.data, places.at, places.counts, sinks, cos_sin, positions, out, parts, peaks,
            totals, scale * LOG2E, q.stride(0), places.width, heads, d, rotated, block, tile.n,
            splits, q.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    else:
        sparse_kernel[(rows, blocks, splits)](
            q, local.data, places.at, places.scale_at, places.counts, sinks, cos_sin, positions,
            out, parts, peaks, totals, scale * LOG2E, q.stride(0), places.width, heads, d, rotated,
            block, tile.n, splits, q.dtype == torch.float32, (1 if native else 2) if scaled else 0,
            hopper, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=hopper,
        )  # fmt: skip
    if splits > 1:
        merge_kernel[(rows, heads)](
            parts, peaks, totals, places.counts, sinks, cos_sin, positions, out, heads, d, rotated,
            splits, hopper, num_warps=4, launch_pdl=hopper,
        )  # fmt: skip
    return out


wgmma = partial(attn_sparse, hopper=True)
"""`attn_sparse` for Hopper: as many heads as tiles of 64, 512 channels, plain latents."""
wgmma_scaled = partial(attn_sparse_scaled, hopper=True)
"""The same over ``latent-fp8@1``."""
