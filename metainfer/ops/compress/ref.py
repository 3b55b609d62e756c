"""Windows of tokens become cache entries; raw rows wait in a ring until their window closes."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, StateRows, store
from metainfer.ops.common import hadamard, rotate_tail, wide


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """How many entries a query at each position sees: ``(t + 1) // ratio``."""
    return (positions + 1) // ratio


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
) -> None:
    """Store the entries of all windows that this call's tokens close, and keep its last rows.

    kv, gate [T, C], C = 2 d with `overlap`, else d; ape [ratio, C]; weight [d]; cos_sin [M, R]
    float32; state [B + 1, 2, L, C]; lines [S], slots [T] int64; query_start [S + 1],
    context_lens [S] int32. See the folder's README.
    """
    ring = state.data
    starts = query_start.tolist()
    for s, (line, context) in enumerate(zip(lines.tolist(), context_lens.tolist(), strict=True)):
        begin, end = starts[s], starts[s + 1]
        first = context - (end - begin)
        positions = torch.arange(first, context, device=kv.device)
        rows = wide(kv[begin:end])
        z = wide(gate[begin:end]) + ape.to(rows.dtype)[positions % ratio]
        new = torch.stack((rows, z))  # [2, n, C]
        opened, closed = first // ratio, context // ratio
        if opened < closed:
            low = max(opened - int(overlap), 0) * ratio
            kept = torch.arange(low, first, device=kv.device) % ring.shape[2]
            old = ring[line][:, kept].to(new.dtype)
            taken = torch.cat((old, new[:, : closed * ratio - first]), dim=1)
            pooled = _overlapping(taken, ratio, opened) if overlap else _apart(taken, ratio)
            entries = finish(
                pooled, weight, cos_sin, torch.arange(opened, closed) * ratio, pages, eps
            )
            last = torch.arange(opened + 1, closed + 1, device=kv.device) * ratio - 1
            store(pages, slots[begin + last - first], entries)
        length = min(end - begin, ring.shape[2])
        if length:
            ring[line, :, positions[-length:] % ring.shape[2]] = new[:, -length:].to(ring.dtype)


def finish(
    pooled: Tensor,
    weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    pages: EntryPages,
    eps: float,
) -> Tensor:
    """Norm, rotation at each window's first position, and Hadamard where the form says: [n, d]."""
    scale = torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps)
    normed = pooled * scale * weight.to(pooled.dtype)
    turned = rotate_tail(normed, cos_sin[positions.to(cos_sin.device)])
    return hadamard(turned) if pages.form.hadamard else turned


def _apart(rows: Tensor, ratio: int) -> Tensor:
    """rows [2, n * ratio, d] -> [n, d]: each window by itself."""
    both = rows.reshape(2, -1, ratio, rows.shape[-1])  # [kv and z, n, ratio, d]
    return (torch.softmax(both[1], dim=1) * both[0]).sum(dim=1)


def _overlapping(rows: Tensor, ratio: int, opened: int) -> Tensor:
    """rows [2, .., 2 d] -> [n, d]; they begin one window early, except for window 0."""
    if opened == 0:
        none = rows.new_zeros(2, ratio, rows.shape[-1])
        none[1] = float("-inf")
        rows = torch.cat((none, rows), dim=1)
    windows = rows.reshape(2, -1, ratio, rows.shape[-1])
    before, own = windows[:, :-1].chunk(2, dim=-1)[0], windows[:, 1:].chunk(2, dim=-1)[1]
    both = torch.cat((before, own), dim=2)  # [kv and z, n, 2 ratio, d]
    return (torch.softmax(both[1], dim=1) * both[0]).sum(dim=1)
