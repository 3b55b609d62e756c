"""Compressors in Triton, one launch for any mix of prompts and decodes: programs for each token.

They keep their token's raw row, and where the token closes a window they pool the window (online
softmax per channel, in float32); then the entry is normed, turned, mixed and stored. A long window
is pooled in slices of channels, by as many programs as help; the last to arrive makes the entry.
Older rows come from the ring, which the same launch writes: no row is written before it was read,
because of two halves of a rule. Each half of an old row is read by one window alone. A new row
whose place in the ring still holds a row that a window of this call reads is written by that
window's program of the same channels, after it has read; any other by its own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.kv.store.entries import EntryPages, StateRows
from metainfer.ops.compress.tiles import Tile, each_for, tile_for
from metainfer.ops.triton_entries import (
    form_constants,
    mixed_by_hadamard,
    sequence_of,
    store_entry,
    turned,
)


@triton.jit
def _keep(
    kv, gate, ape, ring, row, place, offset, channel, mask, WIDTH: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    """Raw rows into the ring: values, and gates with their bias. `row`: (of kv, of gate), `place`
    in the ring, `offset` of the bias, all in elements."""
    value = tl.load(kv + row[0] + channel, mask=mask, other=0.0)
    z = tl.load(gate + row[1] + channel, mask=mask, other=0.0)
    z += tl.load(ape + offset + channel, mask=mask, other=0.0)
    tl.store(ring + place + channel, value, mask=mask)
    tl.store(ring + L * WIDTH + place + channel, z, mask=mask)


@triton.jit
def _keep_own(
    kv, gate, ape, ring, t, position, first, context, kv_stride, gate_stride, lane,
    RATIO: tl.constexpr, HALVES: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Token t's row, channels `lane` of each half, but for halves whose place holds what a window
    of this call reads."""
    WIDTH: tl.constexpr = HALVES * D
    old = position - L * ((position - first) // L + 1)  # whose row stands there
    row = (t * kv_stride, t * gate_stride)
    for half in tl.static_range(HALVES):
        # A half that serves the next window is read when that one closes.
        closing = (old // RATIO + HALVES - half) * RATIO - 1
        read = (old >= 0) & (closing >= first) & (closing < context)
        if not read:
            _keep(
                kv, gate, ape, ring, row, position % L * WIDTH, position % RATIO * WIDTH,
                half * D + lane, lane < D, WIDTH, L,
            )  # fmt: skip


@triton.jit
def _pooled(
    kv, gate, ape, ring, t, position, first, kv_stride, gate_stride, lane,
    RATIO: tl.constexpr, HALVES: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr,
    L: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The window that token t closes: softmax of the gates times the values, [SLICE]."""
    WIDTH: tl.constexpr = HALVES * D
    lane = lane[None, :]
    peak = tl.full([SLICE], -3.0e38, tl.float32)
    total = tl.zeros([SLICE], tl.float32)
    mixed = tl.zeros([SLICE], tl.float32)
    for step in range(tl.cdiv(RATIO * HALVES, ROWS)):
        slot = step * ROWS + tl.arange(0, ROWS)[:, None]
        at = position - (RATIO * HALVES - 1) + slot  # positions [ROWS, 1]
        channel = lane + (slot // RATIO) * D  # an overlapping window's first rows give half 0
        seen = (at >= 0) & (slot < RATIO * HALVES) & (lane < D)
        new = seen & (at >= first)
        row = t - (position - at)
        place = ring + at % L * WIDTH + channel
        value = tl.load(tl.where(new, kv + row * kv_stride + channel, place), mask=seen, other=0.0)
        place = tl.where(new, gate + row * gate_stride + channel, place + L * WIDTH)
        z = tl.load(place, mask=seen, other=0.0)
        z += tl.load(ape + at % RATIO * WIDTH + channel, mask=new, other=0.0)
        z = tl.where(seen, z, float("-inf"))
        above = tl.maximum(peak, tl.max(z, axis=0))
        weight = tl.exp(z - above[None, :])
        fade = tl.exp(peak - above)
        total = total * fade + tl.sum(weight, axis=0)
        mixed = mixed * fade + tl.sum(weight * value, axis=0)
        peak = above
    return mixed / total


@triton.jit
def _keep_later(
    kv, gate, ape, ring, t, position, first, context, kv_stride, gate_stride, lane,
    RATIO: tl.constexpr, HALVES: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of this call whose places held the old rows that `_pooled` has read."""
    WIDTH: tl.constexpr = HALVES * D
    lane = lane[None, :]
    tl.debug_barrier()
    for step in range(tl.cdiv(RATIO * HALVES, ROWS)):
        slot = step * ROWS + tl.arange(0, ROWS)[:, None]
        old = position - (RATIO * HALVES - 1) + slot
        at = old + (context - 1 - old) // L * L  # the last position of this call at that place
        mask = (old >= 0) & (old < first) & (at >= first) & (slot < RATIO * HALVES) & (lane < D)
        row = t - (position - at)
        _keep(
            kv, gate, ape, ring, (row * kv_stride, row * gate_stride), at % L * WIDTH,
            at % RATIO * WIDTH, lane + (slot // RATIO) * D, mask, WIDTH, L,
        )  # fmt: skip


@triton.jit
def _window(
    kv, gate, ape, ring, t, position, first, context, kv_stride, gate_stride, lane,
    RATIO: tl.constexpr, HALVES: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr,
    L: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`_pooled`, and the rows that waited for it."""
    pooled = _pooled(
        kv, gate, ape, ring, t, position, first, kv_stride, gate_stride, lane,
        RATIO, HALVES, D, SLICE, L, ROWS,
    )  # fmt: skip
    if position - (RATIO * HALVES - 1) < first:
        _keep_later(
            kv, gate, ape, ring, t, position, first, context, kv_stride, gate_stride, lane,
            RATIO, HALVES, D, L, ROWS,
        )  # fmt: skip
    return pooled


@triton.jit
def _make_entry(
    pooled, weight, row, data, slot, eps,
    D: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr, HADAMARD: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr, SCALES: tl.constexpr,
    PAGE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Norm, turn by the angle at `row`, mix, and store the pooled window [LANES]."""
    lane = tl.arange(0, LANES)
    power = tl.sum(tl.where(lane < D, pooled * pooled, 0.0), axis=0) / D
    entry = pooled * tl.rsqrt(power + eps)
    entry *= tl.load(weight + lane, mask=lane < D, other=0.0)
    entry = tl.reshape(turned(tl.reshape(entry, [1, LANES]), row, 1, LANES, D, R), [LANES])
    if HADAMARD:
        entry = mixed_by_hadamard(entry, D)
    store_entry(data, slot, entry, LANES, D, FORM, GROUP, TAIL, SCALES, PAGE, STRIDE)


@triton.jit
def _sequence(query_start, sequences, t):
    """`sequence_of`; in a decode step row t is sequence t's, which is asked first."""
    s = tl.minimum(t, sequences - 1).to(tl.int32)
    if (tl.load(query_start + s) != t) | (tl.load(query_start + s + 1) != t + 1):
        s = sequence_of(query_start, sequences, t)
    return s


@triton.jit(do_not_specialize=["sequences", "each"])
def compress_kernel(
    kv, gate, ape, weight, cos_sin, ring, lines, data, slots, query_start, context_lens, kv_stride,
    gate_stride, sequences, eps, parts, counters, each,
    RATIO: tl.constexpr, HALVES: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    SLICE: tl.constexpr, R: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr,
    HADAMARD: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr,
    SCALES: tl.constexpr, PAGE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Program (token, share of `each` slices). `parts` [T, D]: pooled slices on their way to the
    program that makes the entry; `counters` [T]: who arrived, zero before and after a launch."""
    t = tl.program_id(0).to(tl.int64)
    s = _sequence(query_start, sequences, t)
    if s < sequences:
        end = tl.load(query_start + s + 1).to(tl.int64)
        context = tl.load(context_lens + s).to(tl.int64)
        first = context - (end - tl.load(query_start + s))
        position = context - (end - t)
        mine = ring + tl.load(lines + s) * (2 * L * HALVES * D)
        kept, closes = position >= context - L, (position + 1) % RATIO == 0
        if SLICE == LANES:
            lane = tl.arange(0, LANES)
            if kept:
                _keep_own(
                    kv, gate, ape, mine, t, position, first, context, kv_stride, gate_stride,
                    lane, RATIO, HALVES, D, L,
                )  # fmt: skip
            if closes:
                pooled = _window(
                    kv, gate, ape, mine, t, position, first, context, kv_stride, gate_stride,
                    lane, RATIO, HALVES, D, LANES, L, ROWS,
                )  # fmt: skip
                slot = tl.load(slots + t)
                if slot >= 0:
                    _make_entry(
                        pooled, weight, cos_sin + (position + 1 - RATIO) * R, data, slot, eps,
                        D, LANES, R, HADAMARD, FORM, GROUP, TAIL, SCALES, PAGE, STRIDE,
                    )  # fmt: skip
        else:
            begin = tl.program_id(1) * each
            # Invariants of the loop would fill the registers that its loads need.
            for part in tl.range(begin, begin + each, disable_licm=True):
                lane = part * SLICE + tl.arange(0, SLICE)
                if kept:
                    _keep_own(
                        kv, gate, ape, mine, t, position, first, context, kv_stride, gate_stride,
                        lane, RATIO, HALVES, D, L,
                    )  # fmt: skip
                if closes:
                    pooled = _window(
                        kv, gate, ape, mine, t, position, first, context, kv_stride, gate_stride,
                        lane, RATIO, HALVES, D, SLICE, L, ROWS,
                    )  # fmt: skip
                    tl.store(parts + t * D + lane, pooled, mask=lane < D)
            if closes:
                slot = tl.load(slots + t)
                tl.debug_barrier()
                arrived = tl.atomic_add(counters + t, 1, sem="acq_rel")
                if arrived == tl.num_programs(1) - 1:
                    tl.store(counters + t, 0)
                    if slot >= 0:
                        channel = tl.arange(0, LANES)
                        pooled = tl.load(
                            parts + t * D + channel, mask=channel < D, other=0.0,
                            cache_modifier=".cg",
                        )  # fmt: skip
                        _make_entry(
                            pooled, weight, cos_sin + (position + 1 - RATIO) * R, data, slot, eps,
                            D, LANES, R, HADAMARD, FORM, GROUP, TAIL, SCALES, PAGE, STRIDE,
                        )  # fmt: skip


@cache
def _counters(device: torch.device, rows: int) -> Tensor:
    """Arrivals per token: zero before and after every launch."""
    return torch.zeros(rows, dtype=torch.int32, device=device)


def compress(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    weight: Tensor,
    cos_sin: Tensor,
    state: StateRows,
    lines: Tensor,
    pages: EntryPages,
    slots: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    ratio: int,
    overlap: bool,
    eps: float,
    tile: Tile | None = None,
) -> None:
    """See `ref.compress`; kv and gate are float32 with any token stride, the ring is float32."""
    rows, sequences = kv.shape[0], context_lens.shape[0]
    d, halves, length = weight.shape[0], 2 if overlap else 1, state.data.shape[2]
    if kv.stride(1) != 1 or gate.stride(1) != 1 or not state.data.is_contiguous():
        raise InternalError(
            f"compressors want packed rows, got strides {kv.stride()}, {gate.stride()} and "
            f"{state.data.stride()}"
        )
    if rows and sequences:
        lanes = triton.next_power_of_2(d)
        tile = tile or tile_for(ratio * halves, lanes)
        slices = lanes // tile.slice
        each = each_for(rows, slices)
        split = slices > 1
        parts = torch.empty((rows if split else 0, d), dtype=torch.float32, device=kv.device)
        counters = _counters(kv.device, triton.next_power_of_2(rows) if split else 0)
        compress_kernel[(rows, slices // each)](
            kv, gate, ape, weight, cos_sin, state.data, lines, pages.data, slots, query_start,
            context_lens, kv.stride(0), gate.stride(0), sequences, eps, parts, counters, each,
            ratio, halves, d, lanes, tile.slice, cos_sin.shape[1], length, tile.rows,
            pages.form.hadamard, *form_constants(pages), num_warps=tile.warps,
        )  # fmt: skip
