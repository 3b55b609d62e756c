"""Cases of `swiglu`: odd widths, no rows, gates far out on both sides."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.kernels.impl import OpRequest
from metainfer.ops.activation.ref import swiglu, swiglu_clamp
from metainfer.ops.case import Case, generator, normal
from metainfer.ops.common import wide


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


def clamp_cases(seed: int) -> list[Case]:
    """Every limit, with values on both sides of it and none (0)."""
    found = []
    for limit in (10.0, 0.75, 0.0):
        for case in cases(seed):
            name = f"{case.name}-limit{limit:g}"
            args = (*case.args, limit)
            found.append(dataclasses.replace(case, op="swiglu_clamp", name=name, args=args))
    return found


def clamp_recipe(gate_up: Tensor, limit: float) -> Tensor:
    """DeepSeek's expert: float32 from the product to the next one."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _swapped(gate_up: Tensor) -> Tensor:
    return torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1)


def _clamped_below(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    low = gate.clamp(min=-limit) if limit else gate
    return swiglu_clamp(torch.cat((low, up), dim=-1), limit)


def shaped(request: OpRequest, rows: int, seed: int) -> Case:
    """The request's shape at `rows` rows."""
    f = request.shape["f"]
    x = normal(generator(seed), rows, 2 * f, scale=2.0)
    return Case(op="swiglu", name=f"{rows}x{f}", args=(x,), shape={"rows": rows, "f": f})


SHAPED = {"swiglu": shaped}
CASES = {"swiglu": cases, "swiglu_clamp": clamp_cases}
REFERENCES = {"swiglu": swiglu, "swiglu_clamp": swiglu_clamp}
RECIPES = {"swiglu": recipe, "swiglu_clamp": clamp_recipe}
MISTAKES = {
    "swiglu": {"gate and up swapped": (lambda x: swiglu(_swapped(x)),)},
    "swiglu_clamp": {
        "swiglu clamp": (lambda x, limit: swiglu_clamp(x, 0.0),),
        "gate's lower clamp": (_clamped_below,),
        "gate and up swapped": (lambda x, limit: swiglu_clamp(_swapped(x), limit),),
    },
}
