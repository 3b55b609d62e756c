"""Cases of `embed`: every scheme, repeated and border ids, no ids."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.case import Case, Weight, generator, integers, normal
from metainfer.ops.embed.ref import embed
from metainfer.ops.linear.cases import stored

SCHEMES = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "fp8_128", "fp8_row_32", "mxfp4")


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for scheme in SCHEMES:
        for rows, v, d in ((0, 33, 64), (1, 1, 32), (7, 50, 64), (130, 97, 160)):
            ids = integers(g, v, rows)
            if rows > 2:
                ids[0], ids[1], ids[2] = 0, v - 1, v - 1
            table = Weight((stored(normal(g, v, d), scheme),))
            found.append(
                Case(
                    op="embed",
                    name=f"{scheme}-{rows}of{v}x{d}",
                    args=(ids, table),
                    shape={"rows": rows, "v": v, "d": d},
                    schemes=(scheme,),
                )
            )
    ids = torch.zeros(3, dtype=torch.int64)
    odd = Weight((stored(normal(g, 5, 33), "F32"),))
    shape = {"rows": 3, "v": 5, "d": 33}
    found.append(Case(op="embed", name="odd-width", args=(ids, odd), shape=shape, schemes=("F32",)))
    return found


CASES = {"embed": cases}


def recipe(*args: Tensor) -> Tensor:
    """Reading rows has one way."""
    return embed(*args)  # type: ignore[arg-type]


REFERENCES = {"embed": embed}
RECIPES = {"embed": recipe}
MISTAKES = {
    "embed": {"row": (lambda ids, table: embed((ids + 1) % table.shape[0], table),)},
}
