"""Sampling that orders only the head of the distribution when that is enough.

Same draws as the reference: only how the kept set is found differs. Top-k and top-p are decided on
the `HEAD` best logits when these hold every row's cut; else by the full sort, as are equal logits
at the head's border, where the lower id must win. (A top-p cut compares float64 sums taken in
another order: a token within about 1e-15 of the border may fall to the other side.)

Looking at the head's mass waits for the device; a step that only takes argmaxes does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.sample import ref
from metainfer.ops.sample.inputs import SampleInputs, SampleOutput

HEAD = 256


def sample(logits: Tensor, inputs: SampleInputs) -> SampleOutput:
    """See `ref.sample`."""
    return ref.sample(logits, inputs, kept=kept_by_head)


def kept_by_head(hot: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The set of `ref.kept_by_sorting`: bool [R, V]."""
    head = min(HEAD + 1, hot.shape[1])
    values, order = hot.topk(head, dim=-1)
    # Order of the candidates: falling value, then rising id.
    order, by_id = order.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    order = order.gather(1, by_value)
    found = values
    place = torch.arange(head, device=hot.device).expand_as(values)
    keep = torch.ones_like(values, dtype=torch.bool)
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, hot.shape[1]).unsqueeze(1)
        keep = place < limit
        values = values.masked_fill(~keep, float("-inf"))
    if top_p is not None:
        weight = values.double().exp()
        total = weight.sum(dim=-1, keepdim=True)
        if top_k is None or bool((limit > head).any()):
            everything = hot.double().exp().sum(dim=-1, keepdim=True)
            total = everything if top_k is None else torch.where(limit > head, everything, total)
        mass = weight / total
        before = mass.cumsum(dim=-1) - mass
        wanted = top_p.double().unsqueeze(1)
        keep = keep & ((before < wanted) | (wanted >= 1.0) | (place == 0))
    # An id outside the head may equal the head's last one, so a kept one must be better than it.
    border = keep & (found == found[:, -1:])
    if head < hot.shape[1] and bool(border.any()):
        return ref.kept_by_sorting(hot, top_k, top_p)
    return torch.zeros_like(hot, dtype=torch.bool).scatter(1, order, keep)
