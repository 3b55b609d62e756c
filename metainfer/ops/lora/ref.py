"""Low-rank adapters: the reference, adapter by adapter and part by part."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from metainfer.ops.common import wide
from metainfer.ops.lora.rows import AdapterRows


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
    """``y[t, span] += scale * (x[t] Aᵀ) Bᵀ`` in place, with the pair of row t's adapter; gives y.

    y [T, N], x [T, K], a [n, P, R, K], b [C, n, R], scale [n, P]; `spans`: (start, width) of each
    part's columns in y. Sums in float32 (float64 stays), rounded once. Source: Hu et al. 2021,
    "LoRA", equation 3.
    """
    for adapter in range(a.shape[0]):
        mine = (rows.index == adapter).nonzero().squeeze(1)
        at = 0
        for part, (start, width) in enumerate(spans):
            low = wide(x[mine]) @ wide(a[adapter, part]).T * scale[adapter, part]  # [t, R]
            update = low @ wide(b[at : at + width, adapter]).T  # [t, width]
            columns = y[:, start : start + width]
            columns[mine] = (wide(columns[mine]) + update).to(y.dtype)
            at += width
    return y
