"""Cases of `out_group`: one group, one head per group, odd sizes, no rows, rows of zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.case import Case, generator, normal
from metainfer.ops.out_group.ref import out_group

#: (rows, Hq, D, G, N)
SIZES = (
    (0, 4, 16, 2, 8),
    (1, 1, 1, 1, 1),
    (3, 6, 33, 3, 17),
    (5, 4, 32, 4, 24),
    (7, 8, 64, 1, 40),
    (2, 64, 64, 8, 32),
)


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, hq, d, groups, n in SIZES:
        o, k = normal(g, rows, hq, d), hq * d // groups
        if rows > 2:
            o[1] = 0
        found.append(
            Case(
                op="out_group",
                name=f"{rows}x{hq}x{d}-{groups}x{n}",
                args=(o, normal(g, groups, n, k, scale=k**-0.5)),
                shape={"rows": rows, "hq": hq, "d": d, "groups": groups, "n": n},
            )
        )
    return found


def recipe(o: Tensor, weight: Tensor) -> Tensor:
    """One batched product in the dtype, as published."""
    groups, _, k = weight.shape
    rows = o.reshape(-1, groups, k).transpose(0, 1)
    return torch.bmm(rows, weight.transpose(1, 2)).transpose(0, 1).flatten(1)


CASES = {"out_group": cases}
REFERENCES = {"out_group": out_group}
RECIPES = {"out_group": recipe}
