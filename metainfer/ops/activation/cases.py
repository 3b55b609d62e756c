"""Cases of `swiglu`: odd widths, no rows, gates far out on both sides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.activation.ref import swiglu
from metainfer.ops.case import Case, generator, normal


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, f in ((0, 64), (1, 1), (1, 1536), (3, 33), (8, 257), (130, 64)):
        x = normal(g, rows, 2 * f, scale=2.0)
        if f > 8 and rows:
            x[0, :4] = torch.tensor([-100.0, -30.0, 0.0, 60.0], dtype=torch.float64)
        shape = {"rows": rows, "f": f}
        found.append(Case(op="swiglu", name=f"{rows}x{f}", args=(x,), shape=shape))
    return found


def recipe(gate_up: Tensor) -> Tensor:
    """`LlamaMLP`: silu rounds before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


CASES = {"swiglu": cases}
REFERENCES = {"swiglu": swiglu}
RECIPES = {"swiglu": recipe}
