"""`compress` for all sequences of a call at once: one gather per half, one softmax.

Asks the host which windows close, so it cannot be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, StateRows, store
from metainfer.ops.common import hadamard, turn_tail_, wide


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
    count = int(query_start[-1])
    starts, lens = query_start.long(), context_lens.long()
    sequence = torch.repeat_interleave(starts.diff(), output_size=count)
    shift = lens - starts[1:]  # position minus row
    own = shift.index_select(0, sequence) + torch.arange(count, device=kv.device)
    line = lines.index_select(0, sequence)
    values = wide(kv[:count])
    gates = wide(gate[:count]) + ape.to(values.dtype).index_select(0, own % ratio)
    last = ((own + 1) % ratio == 0).nonzero().squeeze(1)
    if len(last):
        first = (starts[:-1] + shift).index_select(0, sequence)
        taken = _windows(values, gates, state.data, own, first, line, last, ratio, overlap)
        pooled = (torch.softmax(taken[1], dim=1) * taken[0]).sum(dim=1)
        power = (pooled * pooled).mean(dim=-1, keepdim=True)
        entries = pooled * (power + eps).rsqrt() * weight.to(pooled.dtype)
        turn_tail_(entries, cos_sin.index_select(0, own[last] + 1 - ratio))
        store(pages, slots[last], hadamard(entries) if pages.form.hadamard else entries)
    _keep(values, gates, state.data, own, lens.index_select(0, sequence), line)


def _windows(
    values: Tensor,
    gates: Tensor,
    ring: Tensor,
    own: Tensor,
    first: Tensor,
    line: Tensor,
    last: Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[Tensor, Tensor]:
    """Values and gates [n, slots, d] of the windows that the rows `last` close.

    `first` is each row's first position of this call: older rows come from the ring.
    """
    slots = ratio * (2 if overlap else 1)
    d = values.shape[1] // (2 if overlap else 1)
    back = torch.arange(1 - slots, 1, device=own.device)
    places = own[last].unsqueeze(1) + back  # positions [n, slots]
    rows = (last.unsqueeze(1) + back).clamp_min(0)
    if overlap:
        halves = [(rows[:, :ratio], slice(0, d)), (rows[:, ratio:], slice(d, None))]
    else:
        halves = [(rows, slice(None))]
    taken = [
        torch.cat([part[:, channels][which] for which, channels in halves], dim=1)
        for part in (values, gates)
    ]
    window, slot = ((places < first[last].unsqueeze(1)) & (places >= 0)).nonzero(as_tuple=True)
    if len(window):
        at = places[window, slot] % ring.shape[2]
        old = ring[line[last][window], :, at]  # [m, 2, C]
        if overlap:
            old = torch.where((slot < ratio)[:, None, None], old[..., :d], old[..., d:])
        for kind, part in enumerate(taken):
            part[window, slot] = old[:, kind].to(part.dtype)
    if overlap:
        before = (places < 0).unsqueeze(2)
        taken[0].masked_fill_(before, 0.0)
        taken[1].masked_fill_(before, float("-inf"))
    return taken[0], taken[1]


def _keep(
    values: Tensor, gates: Tensor, ring: Tensor, own: Tensor, lens: Tensor, line: Tensor
) -> None:
    """The last rows of each sequence go into the ring; older ones of this call never do."""
    length = ring.shape[2]
    kept = (own >= lens - length).nonzero().squeeze(1)
    rows = torch.stack((values[kept], gates[kept]), dim=1)  # [k, 2, C]
    ring[line[kept], :, own[kept] % length] = rows.to(ring.dtype)
