"""Cases of `lora`: no rows, rows without an adapter, every mix, unequal ranks, parts left out.

Columns outside the spans and rows without an adapter must keep their bits; some of those rows are
NaN, as what a kernel left in padding may be.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.case import Case, generator, normal
from metainfer.ops.lora.ref import lora
from metainfer.ops.lora.rows import AdapterRows

Spans = tuple[tuple[int, int], ...]

#: (name, index of each row, K, N, spans, ranks of the adapters)
SIZES: tuple[tuple[str, tuple[int, ...], int, int, Spans, tuple[int, ...]], ...] = (
    ("no-rows", (), 64, 48, ((0, 48),), (4,)),
    ("one-row", (0,), 33, 40, ((0, 40),), (5,)),
    ("one-run", (0,) * 17, 96, 40, ((0, 40),), (8,)),
    ("decode", (1, -1, 0, 2, 1, 0, -1, 2), 64, 96, ((0, 64), (64, 16), (80, 16)), (8, 2, 16)),
    ("chunks", (-1,) * 5 + (1,) * 40 + (0,) * 21, 129, 65, ((0, 65),), (5, 7)),
    ("query-and-value", (0, 1, 1, 0, 3, -1), 48, 80, ((0, 48), (64, 16)), (4, 4, 1, 9)),
    ("up-alone", (2,) * 9 + (-1,) * 3 + (2,) * 4, 40, 66, ((33, 33),), (6, 6, 6)),
    ("wide", (0, 2, 1, 2, 0), 320, 512, ((0, 512),), (64, 8, 33)),
    ("none-has-one", (-1, -1, -1), 33, 20, ((0, 20),), (3, 2)),
    ("many", tuple(i % 13 - 1 for i in range(70)), 32, 24, ((0, 24),), (2,) * 12),
)


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for name, index, k, n, spans, ranks in SIZES:
        count, parts, rank = len(ranks), len(spans), max(ranks)
        covered = sum(width for _, width in spans)
        a = normal(g, count, parts, rank, k, scale=k**-0.5)
        b = normal(g, covered, count, rank, scale=0.5)
        for adapter, own in enumerate(ranks):
            a[adapter, :, own:] = 0
            b[:, adapter, own:] = 0
        x, y = normal(g, len(index), k), normal(g, len(index), n)
        if name in ("decode", "up-alone"):
            empty = torch.tensor(index) == -1
            x[empty], y[empty] = float("nan"), float("nan")
        scale = (0.25 + 2 * torch.rand(count, parts, generator=g)).float()
        rows = AdapterRows(torch.tensor(index, dtype=torch.int64))
        shape = {"rows": len(index), "n": covered, "k": k, "parts": parts}
        found.append(
            Case(
                op="lora",
                name=name,
                args=(y, x, a, b, scale, rows),
                kwargs={"spans": spans},
                shape={**shape, "adapters": count, "rank": rank, "seqs": max(1, len(set(index)))},
                outputs=(0,),
            )
        )
    return found


def recipe(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    rows: AdapterRows,
    *,
    spans: Spans,
) -> Tensor:
    """What PEFT's `Linear` does in the model's dtype: every product and the sum round."""
    for adapter in range(a.shape[0]):
        mine = (rows.index == adapter).nonzero().squeeze(1)
        at = 0
        for part, (start, width) in enumerate(spans):
            low = F.linear(x[mine], a[adapter, part])
            update = F.linear(low, b[at : at + width, adapter]) * scale[adapter, part].item()
            columns = y[:, start : start + width]
            columns[mine] = columns[mine] + update
            at += width
    return y


CASES = {"lora": cases}
REFERENCES = {"lora": lora}
RECIPES = {"lora": recipe}
