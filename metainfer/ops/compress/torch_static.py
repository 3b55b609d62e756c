"""`compress` for a captured step: every row pools a window as if it closed one.

Only rows with a slot store theirs, so a step costs as if each of its tokens closed a window. What
a row takes (its call's rows, the ring, nothing) is chosen on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, StateRows, put, put_kept
from metainfer.ops.common import hadamard, owners, turn_tail_, wide


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
    """See `ref.compress`."""
    ring, at = state.data, torch.arange(kv.shape[0], device=kv.device)
    if not len(at):
        return
    sequence, real = owners(query_start, len(at))
    lens, starts = context_lens.long(), query_start.long()
    shift = lens - starts[1:]  # position minus row
    own = torch.where(real, shift.index_select(0, sequence) + at, 0)
    first = (starts[:-1] + shift).index_select(0, sequence)
    line = lines.index_select(0, sequence)
    values = wide(kv)
    gates = wide(gate) + ape.to(values.dtype).index_select(0, own % ratio)

    width = ratio * (2 if overlap else 1)
    back = torch.arange(1 - width, 1, device=kv.device)
    places, rows = own.unsqueeze(1) + back, (at.unsqueeze(1) + back).clamp_min(0)  # [T, width]
    old = ring[line.unsqueeze(1), :, places % ring.shape[2]].to(values.dtype)  # [T, width, 2, C]
    fresh, none = (places >= first.unsqueeze(1)).unsqueeze(2), (places < 0).unsqueeze(2)

    def window(part: Tensor, kind: int, empty: float) -> Tensor:
        found = torch.where(fresh, part[rows], old[:, :, kind])  # [T, width, C]
        if overlap:
            before, mine = found.chunk(2, dim=2)
            found = torch.cat((before[:, :ratio], mine[:, ratio:]), dim=1)
        return found.masked_fill_(none, empty)

    share = torch.softmax(window(gates, 1, float("-inf")), dim=1)
    pooled = (share * window(values, 0, 0.0)).sum(dim=1)  # [T, d]
    power = (pooled * pooled).mean(dim=-1, keepdim=True)
    entries = pooled * (power + eps).rsqrt() * weight.to(pooled.dtype)
    turn_tail_(entries, cos_sin.index_select(0, (own + 1 - ratio).clamp_min(0)))
    put(pages, slots, hadamard(entries) if pages.form.hadamard else entries)

    kept = real & (own >= lens.index_select(0, sequence) - ring.shape[2])
    new = torch.stack((values, gates), dim=1).to(ring.dtype)  # [T, 2, C]
    put_kept(ring.transpose(1, 2), (line, own % ring.shape[2]), kept, new)
