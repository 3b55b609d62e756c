"""Cases of the norms: odd widths, zero rows and zeros, large and tiny values, head-wise use."""

from __future__ import annotations

from torch import Tensor

from metainfer.kernels.impl import OpRequest
from metainfer.ops.case import Case, generator, normal
from metainfer.ops.common import wide
from metainfer.ops.norm.ref import add_rmsnorm, rmsnorm

#: (rows, D, scale of x)
SIZES = (
    (0, 64, 1.0),
    (1, 1, 1.0),
    (1, 576, 1.0),
    (3, 33, 1.0),
    (8, 64, 100.0),
    (5, 128, 1e-3),
    (17, 1000, 1.0),
    (4, 4096, 1.0),
    (130, 96, 1.0),
)


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, d, scale in SIZES:
        x, weight = normal(g, rows, d, scale=scale), normal(g, d) + 1
        if rows > 2:
            x[1] = 0
        name, shape = f"{rows}x{d}-{scale:g}", {"rows": rows, "d": d}
        found.append(Case(op="rmsnorm", name=name, args=(x, weight, 1e-5), shape=shape))
    return found


def add_cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, d, scale in SIZES:
        x, residual = normal(g, rows, d, scale=scale), normal(g, rows, d, scale=scale)
        weight = normal(g, d) + 1
        if rows > 2:
            residual[1] = -x[1]
        args = (x, residual, weight, 1e-6)
        name, shape = f"{rows}x{d}-{scale:g}", {"rows": rows, "d": d}
        found.append(Case(op="add_rmsnorm", name=name, args=args, shape=shape))
    return found


def recipe(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`LlamaRMSNorm`: the normalised row is rounded before the weight multiplies it."""
    h = wide(x)
    h = h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    return weight * h.to(x.dtype)


def add_recipe(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return recipe(total, weight, eps), total


def shaped(request: OpRequest, rows: int, seed: int) -> Case:
    """The request's shape at `rows` rows."""
    g, d = generator(seed), request.shape["d"]
    x, residual, weight = normal(g, rows, d), normal(g, rows, d), normal(g, d) + 1
    args = (x, weight, 1e-6) if request.op == "rmsnorm" else (x, residual, weight, 1e-6)
    return Case(op=request.op, name=f"{rows}x{d}", args=args, shape={"rows": rows, "d": d})


SHAPED = {"rmsnorm": shaped, "add_rmsnorm": shaped}
CASES = {"rmsnorm": cases, "add_rmsnorm": add_cases}
REFERENCES = {"rmsnorm": rmsnorm, "add_rmsnorm": add_rmsnorm}
RECIPES = {"rmsnorm": recipe, "add_rmsnorm": add_recipe}


def _not_added(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rmsnorm(x, weight, eps), x + residual


MISTAKES = {
    "rmsnorm": {
        "eps": (lambda x, weight, eps: rmsnorm(x, weight, 0.1 * eps),),
        "norm weight": (lambda x, weight, eps: rmsnorm(x, weight + 1, eps),),
    },
    "add_rmsnorm": {
        "norm weight": (lambda x, r, weight, eps: add_rmsnorm(x, r, weight + 1, eps),),
        "residual": (_not_added,),
    },
}
