"""Cases of the routers: ties, one expert, all experts, no rows, rows of zeros, strong biases.

Inputs are small multiples of powers of two: products and sums are exact in every dtype, and two
different scores are far apart, so the chosen experts must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metainfer.ops.case import Case, generator, integers
from metainfer.ops.common import wide
from metainfer.ops.moe_route.ref import moe_route, moe_route_hash

#: (rows, K, E, top_k, size of the bias)
SIZES = (
    (0, 16, 8, 2, 1.0),
    (1, 1, 1, 1, 1.0),
    (9, 24, 256, 6, 1.0),
    (5, 33, 8, 2, 0.0),
    (4, 16, 6, 6, 1.0),
    (17, 7, 12, 3, 30.0),
)


def exact(g: torch.Generator, steps: int, unit: float, *shape: int) -> Tensor:
    """Multiples of `unit` up to `steps` either way, float64."""
    return (integers(g, 2 * steps + 1, *shape) - steps).double() * unit


def _inputs(g: torch.Generator, rows: int, k: int, e: int) -> tuple[Tensor, Tensor]:
    x, gate = exact(g, 8, 0.25, rows, k), exact(g, 4, 0.0625, e, k)
    if rows > 1:
        x[0] = 0  # all scores tie
    if e > 3:
        gate[3] = gate[1]  # and these two always
    return x, gate


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, k, e, top_k, size in SIZES:
        x, gate = _inputs(g, rows, k, e)
        bias = (exact(g, 64, 1 / 64, e) * size).float()
        if e > 3:
            bias[3] = bias[1]
        found.append(
            Case(
                op="moe_route",
                name=f"{rows}x{k}-{top_k}of{e}-{size:g}",
                args=(x, gate, bias),
                kwargs={"top_k": top_k, "scale": 1.5},
                shape={"rows": rows, "k": k, "e": e, "top_k": top_k},
            )
        )
    return found


def hash_cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, k, e, top_k, _ in SIZES:
        x, gate = _inputs(g, rows, k, e)
        table = torch.stack([torch.randperm(e, generator=g)[:top_k] for _ in range(50)])
        found.append(
            Case(
                op="moe_route_hash",
                name=f"{rows}x{k}-{top_k}of{e}",
                args=(x, gate, table, integers(g, 50, rows)),
                kwargs={"scale": 1.5},
                shape={"rows": rows, "k": k, "e": e, "top_k": top_k},
            )
        )
    return found


def recipe(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The published code's scores and weights, for the choice that settles ties."""
    ids, _ = moe_route(x, gate, bias, top_k=top_k, scale=scale)
    return ids, _recipe_weights(x, gate, ids, scale)


def hash_recipe(
    x: Tensor, gate: Tensor, table: Tensor, token_ids: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    ids = table[token_ids].int()
    return ids, _recipe_weights(x, gate, ids, scale)


def _recipe_weights(x: Tensor, gate: Tensor, ids: Tensor, scale: float) -> Tensor:
    s = torch.nn.functional.softplus(wide(x) @ wide(gate).T).sqrt()
    chosen = s.gather(1, ids.long())
    return chosen / chosen.sum(dim=-1, keepdim=True) * scale


CASES = {"moe_route": cases, "moe_route_hash": hash_cases}
REFERENCES = {"moe_route": moe_route, "moe_route_hash": moe_route_hash}
RECIPES = {"moe_route": recipe, "moe_route_hash": hash_recipe}


def _last_of_ties(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Equal scores go to the higher expert."""
    ids, weights = moe_route(x, gate.flip(0), bias.flip(0), top_k=top_k, scale=scale)
    return gate.shape[0] - 1 - ids, weights


def _by_score(
    x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    return moe_route(x, gate, torch.zeros_like(bias), top_k=top_k, scale=scale)


def _scaled(change: Callable[[float], float], op: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Tensor, scale: float, **more: int) -> Any:
        return op(*args, scale=change(scale), **more)

    return wrong


_ROUTERS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("moe_route", moe_route),
    ("moe_route_hash", moe_route_hash),
)
MISTAKES = {
    op: {
        "double routed scale": (_scaled(lambda scale: scale * scale, function),),
        "routed scale": (_scaled(lambda scale: 1.0, function),),
    }
    for op, function in _ROUTERS
}
MISTAKES["moe_route"] |= {"tie order": (_last_of_ties,), "selection bias": (_by_score,)}
