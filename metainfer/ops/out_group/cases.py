"""Cases of `out_group`: one group, one head per group, odd sizes, no rows, rows of zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.case import Case, Weight, generator, normal
from metainfer.ops.linear.cases import stored
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.out_group.ref import out_group

#: (rows, H, d, G, R, scheme)
SIZES = (
    (0, 4, 16, 2, 8, "F32"),
    (1, 1, 1, 1, 1, "F32"),
    (3, 6, 33, 3, 17, "F32"),
    (5, 4, 32, 4, 24, "F32"),
    (7, 8, 64, 1, 40, "F32"),
    (2, 64, 64, 8, 32, "BF16"),
    (3, 8, 64, 4, 64, "fp8_128"),
    (1, 6, 40, 2, 24, "fp8_128"),
    (4, 4, 32, 2, 32, "fp8_32"),
    (0, 2, 128, 2, 128, "fp8_128"),
    (1, 8, 128, 2, 256, "fp8_128"),
    (5, 8, 64, 4, 128, "fp8_128_f32"),
    (7, 4, 512, 2, 128, "fp8_128"),
    (33, 4, 128, 2, 128, "fp8_128_f32"),
    (130, 8, 64, 2, 128, "fp8_128"),
)


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, hq, d, groups, n, scheme in SIZES:
        o, k = normal(g, rows, hq, d), hq * d // groups
        # blocks of 128 channels differ in size, so a foreign scale shows
        slope = 4.0 ** -(torch.arange(k) // 128 % 4)
        weight = stored(normal(g, groups * n, k, scale=k**-0.5) * slope, scheme)
        o = (o.view(rows, groups, k) / slope).view_as(o)
        if rows > 2:
            o[1] = 0
        found.append(
            Case(
                op="out_group",
                name=f"{scheme}-{rows}x{hq}x{d}-{groups}x{n}",
                args=(o, Weight((weight,))),
                kwargs={"groups": groups},
                shape={"rows": rows, "hq": hq, "d": d, "groups": groups, "n": n},
                schemes=(scheme,),
            )
        )
    return found


def recipe(o: Tensor, weight: PackedWeight, *, groups: int) -> Tensor:
    """One batched product in the dtype, as published."""
    matrices = weight.data["weight"].view(groups, -1, weight.shape[1])
    rows = o.reshape(-1, groups, weight.shape[1]).transpose(0, 1)
    return torch.bmm(rows, matrices.transpose(1, 2)).transpose(0, 1).flatten(1)


CASES = {"out_group": cases}
REFERENCES = {"out_group": out_group}
RECIPES = {"out_group": recipe}
MISTAKES = {
    "out_group": {
        "head groups": (lambda o, weight, *, groups: out_group(o.flip(1), weight, groups=groups),),
    }
}
