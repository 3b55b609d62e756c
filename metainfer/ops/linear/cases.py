"""Cases of `linear`: odd sizes, few and many rows, bias, joined parts, block-quantised weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from metainfer.formats.quant import RawTensor, quantise
from metainfer.formats.schemes import is_quantised
from metainfer.ops.case import Case, Weight, generator, normal
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.ref import linear


def stored(values: Tensor, scheme: str) -> RawTensor:
    """`values` as a checkpoint would hold them."""
    if is_quantised(scheme):
        return quantise(values, scheme)
    return RawTensor("F32", tuple(values.shape), values.float())


#: (rows, N parts, K, scheme, bias)
SIZES: tuple[tuple[int, tuple[int, ...], int, str, bool], ...] = (
    (0, (48,), 64, "F32", False),
    (1, (1,), 1, "F32", True),
    (1, (960,), 576, "F32", False),
    (2, (64, 32, 32), 64, "F32", True),
    (3, (7, 5), 33, "F32", True),
    (8, (200,), 129, "F32", False),
    (17, (100,), 96, "F32", True),
    (64, (96,), 256, "F32", False),
    (130, (70,), 64, "F32", True),
    (1, (48,), 64, "Q8_0", True),
    (5, (33, 31), 96, "Q8_0", False),
    (1, (64,), 576, "Q4_1", False),
    (9, (40,), 64, "Q4_1", True),
    (4, (48, 17), 128, "Q4_0", True),
    (33, (32,), 64, "Q4_0", False),
)


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, parts, k, scheme, biased in SIZES:
        n = sum(parts)
        raws = tuple(stored(normal(g, part, k, scale=k**-0.5), scheme) for part in parts)
        bias = normal(g, n) if biased else None
        x = normal(g, rows, k)
        if rows > 1:
            x[0] = 0  # a padded row
        found.append(
            Case(
                op="linear",
                name=f"{scheme}-{rows}x{'+'.join(map(str, parts))}x{k}{'-bias' * biased}",
                args=(x, Weight(raws, bias)),
                shape={"rows": rows, "n": n, "k": k},
                semantics=frozenset({"bias"} if biased else ()),
                schemes=(scheme,),
            )
        )
    mixed = (stored(normal(g, 32, 64), "Q8_0"), stored(normal(g, 16, 64), "Q4_1"))
    found.append(
        Case(
            op="linear",
            name="mixed-schemes",
            args=(normal(g, 3, 64), Weight(mixed)),
            shape={"rows": 3, "n": 48, "k": 64},
            schemes=("Q8_0", "Q4_1"),
        )
    )
    return found


def recipe(x: Tensor, weight: PackedWeight) -> Tensor:
    """What `torch.nn.Linear` does in the model's dtype."""
    return F.linear(x, weight.data["weight"].to(x.dtype), weight.bias)


CASES = {"linear": cases}
REFERENCES = {"linear": linear}
RECIPES = {"linear": recipe}
