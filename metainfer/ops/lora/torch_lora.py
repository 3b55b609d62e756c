"""Low-rank adapters by matrix products: all at once and masked, or those in use one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.lora.rows import AdapterRows

_HALVES = (torch.bfloat16, torch.float16)


def lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    rows: AdapterRows,
    *,
    spans: Sequence[tuple[int, int]],
) -> Tensor:
    """See `ref.lora`. No host branch on what the rows hold: a captured step may run it.

    Rows of other adapters are selected away, not multiplied by zero: they may overflow.
    """
    count, parts, rank, width = a.shape
    own = rows.index.unsqueeze(1) == torch.arange(count, device=x.device)  # [T, n]
    low = _product(x, a.view(-1, width)).view(-1, count, parts, rank)
    low = torch.where(own[:, :, None, None], low * scale.unsqueeze(-1), 0).to(x.dtype)
    at = 0
    for part, (start, columns) in enumerate(spans):
        each = low[:, :, part].reshape(-1, count * rank)  # [T, n R]
        factor = b[at : at + columns].view(columns, count * rank)
        y[:, start : start + columns].addmm_(each, factor.T)
        at += columns
    return y


def lora_grouped(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    rows: AdapterRows,
    *,
    spans: Sequence[tuple[int, int]],
) -> Tensor:
    """See `ref.lora`: the rows of each adapter in use, gathered unless they follow each other."""
    _, parts, rank, width = a.shape
    for adapter, mine in rows.by_adapter():
        low = _product(x[mine], a[adapter].view(-1, width)).view(-1, parts, rank)
        low = (low * scale[adapter].unsqueeze(-1)).to(x.dtype)
        at = 0
        for part, (start, columns) in enumerate(spans):
            factor = b[at : at + columns, adapter].T  # [R, columns]
            target = y[:, start : start + columns]
            if isinstance(mine, slice):
                target[mine].addmm_(low[:, part], factor)
            else:
                target.index_copy_(0, mine, torch.addmm(target[mine], low[:, part], factor))
            at += columns
    return y


def _product(x: Tensor, a: Tensor) -> Tensor:
    """``x aᵀ`` wide, without widening the factors where the library keeps its float32 sums."""
    if x.is_cuda and x.dtype in _HALVES and x.shape[0]:
        return torch.mm(x, a.T, out_dtype=torch.float32)
    return F.linear(wide(x), wide(a))
