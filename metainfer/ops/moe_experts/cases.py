"""Cases of the experts: empty experts (NaN inside), padded rows, clamps at work, no rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ops.case import Case, generator, normal
from metainfer.ops.common import wide
from metainfer.ops.moe_experts.ref import moe_experts, moe_shared


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: int
    e: int
    k: int
    d: int
    f: int
    limit: float = 0.0
    idle: int = 0  # experts that nobody chooses
    padding: int = 0  # rows without an expert

    @property
    def name(self) -> str:
        tail = f"-limit{self.limit:g}" if self.limit else ""
        return f"{self.rows}x{self.d}x{self.f}-{self.k}of{self.e}{tail}"


SIZES = (
    Sizes(0, 4, 2, 16, 8, 10.0),
    Sizes(1, 1, 1, 1, 1),
    Sizes(5, 8, 2, 33, 17, 2.0, idle=5),
    Sizes(9, 6, 6, 24, 40),
    Sizes(30, 7, 3, 32, 16, 1.0, idle=1, padding=4),
    Sizes(3, 16, 6, 64, 32, 10.0, idle=8, padding=3),
)


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for s in SIZES:
        x = normal(g, s.rows, s.d, scale=3.0)
        w13 = normal(g, s.e, 2 * s.f, s.d, scale=s.d**-0.5)
        w2 = normal(g, s.e, s.d, s.f, scale=s.f**-0.5)
        busy = torch.randperm(s.e, generator=g)[: max(s.e - s.idle, s.k)]
        picks = [busy[torch.randperm(len(busy), generator=g)[: s.k]] for _ in range(s.rows)]
        ids = torch.stack(picks).int() if picks else torch.empty(0, s.k, dtype=torch.int32)
        if s.padding:
            ids[-s.padding :] = -1
        idle = [e for e in range(s.e) if not bool((ids == e).any())]
        w13[idle], w2[idle] = float("nan"), float("nan")
        weights = torch.softmax(normal(g, s.rows, s.k), -1).float() * 1.5
        found.append(_case("moe_experts", s, (x, ids, weights, w13, w2)))
    return found


def shared_cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for s in SIZES:
        x = normal(g, s.rows, s.d, scale=3.0)
        if s.rows > 2:
            x[1] = 0
        w13 = normal(g, 2 * s.f, s.d, scale=s.d**-0.5)
        found.append(_case("moe_shared", s, (x, w13, normal(g, s.d, s.f, scale=s.f**-0.5))))
    return found


def _case(op: str, s: Sizes, args: tuple[Tensor, ...]) -> Case:
    shape = {"rows": s.rows, "d": s.d, "f": s.f}
    if op == "moe_experts":
        shape |= {"e": s.e, "top_k": s.k}
    return Case(
        op=op,
        name=s.name,
        args=args,
        kwargs={"limit": s.limit},
        shape=shape,
        semantics=frozenset({"clamp"} if s.limit else ()),
    )


def recipe(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, *, limit: float = 0.0
) -> Tensor:
    """The published code: products in the dtype, float32 between, weighted and rounded for w2."""
    out = torch.zeros_like(wide(x))
    for expert in sorted(set(ids.flatten().tolist())):
        if expert >= 0:
            token, slot = (ids == expert).nonzero(as_tuple=True)
            weight = weights[token, slot].unsqueeze(1)
            out[token] += wide(_expert(x[token], w13[expert], w2[expert], limit, weight))
    return out.to(x.dtype)


def shared_recipe(x: Tensor, w13: Tensor, w2: Tensor, *, limit: float = 0.0) -> Tensor:
    return _expert(x, w13, w2, limit, torch.ones(1))


def _expert(x: Tensor, w13: Tensor, w2: Tensor, limit: float, weight: Tensor) -> Tensor:
    gate, up = wide(F.linear(x, w13)).chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.linear((F.silu(gate) * up * weight).to(x.dtype), w2)


CASES = {"moe_experts": cases, "moe_shared": shared_cases}
REFERENCES = {"moe_experts": moe_experts, "moe_shared": moe_shared}
RECIPES = {"moe_experts": recipe, "moe_shared": shared_recipe}
