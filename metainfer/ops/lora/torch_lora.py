"""Low-rank adapters by matrix products: all at once and masked, or those in use one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.lora.rows import AdapterRows, Rows

_HALVES = (torch.bfloat16, torch.float16)

ALONE_FLOP = 1.6e7
"""On a CPU, calls below this stay on their own thread (seed): waking torch's threads beside those
of the C kernels cost 9 s a step where it cost 0.3 s without, on a busy machine of two cores."""


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
    with _threads(x, count * rank * (parts * width + b.shape[0])):
        _masked(y, x, a, b, scale, rows, spans)
    return y


def _masked(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    rows: AdapterRows,
    spans: Sequence[tuple[int, int]],
) -> None:
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
    with _threads(x, rank * (parts * width + b.shape[0])):
        for adapter, mine in rows.by_adapter():
            _one(y, x, a[adapter], b[:, adapter], scale[adapter], mine, spans)
    return y


def _one(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    mine: Rows,
    spans: Sequence[tuple[int, int]],
) -> None:
    """One adapter on its rows: a [P, R, K], b [C, R], scale [P]."""
    parts, rank, width = a.shape
    low = _product(x[mine], a.view(-1, width)).view(-1, parts, rank)
    low = (low * scale.unsqueeze(-1)).to(x.dtype)
    at = 0
    for part, (start, columns) in enumerate(spans):
        factor = b[at : at + columns].T  # [R, columns]
        target = y[:, start : start + columns]
        if isinstance(mine, slice):
            target[mine].addmm_(low[:, part], factor)
        else:
            target.index_copy_(0, mine, torch.addmm(target[mine], low[:, part], factor))
        at += columns


@contextmanager
def _threads(x: Tensor, each: int) -> Iterator[None]:
    """One thread for a small call on a CPU; `each`: elements of the pairs that a row meets."""
    before = torch.get_num_threads()
    if x.is_cuda or before == 1 or 2.0 * x.shape[0] * each > ALONE_FLOP:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _product(x: Tensor, a: Tensor) -> Tensor:
    """``x aᵀ`` wide, without widening the factors where the library keeps its float32 sums."""
    if x.is_cuda and x.dtype in _HALVES and x.shape[0]:
        return torch.mm(x, a.T, out_dtype=torch.float32)
    return F.linear(wide(x), wide(a))
