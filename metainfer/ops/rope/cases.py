"""Cases of `rope`: both conventions, partial rotation, repeated and far positions, slices of one
projection and tensors of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.ops.case import Case, generator, integers, normal
from metainfer.ops.rope.ref import rope
from metainfer.ops.rope.tables import RopeSpec, cos_sin

#: (tokens, Hq, Hkv, D, R)
SIZES = (
    (0, 2, 1, 64, 64),
    (1, 9, 3, 64, 64),
    (5, 4, 4, 128, 128),
    (3, 6, 2, 96, 96),
    (17, 3, 1, 64, 32),
    (4, 1, 1, 10, 6),
)
LENGTH = 5000


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for tokens, hq, hkv, d, rotated in SIZES:
        table = cos_sin(RopeSpec(rotated=rotated), LENGTH)
        for interleaved in (False, True):
            positions = integers(g, LENGTH, tokens)
            if tokens > 2:
                positions[0], positions[1], positions[2] = 0, LENGTH - 1, LENGTH - 1
            words = {"interleaved"} if interleaved else set()
            if rotated < d:
                words.add("partial")
            found.append(
                Case(
                    op="rope",
                    name=f"{tokens}x{hq}/{hkv}x{d}r{rotated}{'-pairs' * interleaved}",
                    args=(normal(g, tokens, hq, d), normal(g, tokens, hkv, d), positions, table),
                    kwargs={"interleaved": True} if interleaved else {},
                    shape={"rows": tokens, "hq": hq, "hkv": hkv, "d": d, "rotated": rotated},
                    semantics=frozenset(words),
                    fused=(0, 1) if tokens % 2 else (),
                )
            )
    return found


def recipe(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb`: cosines and sines are rounded to the dtype, as is every product."""
    row = table[positions].to(q.dtype).unsqueeze(1)
    cos, sin = row.chunk(2, dim=-1)

    def turn(x: Tensor) -> Tensor:
        out = x.clone()
        rotated = row.shape[-1]
        if interleaved:
            first, second = slice(0, rotated, 2), slice(1, rotated, 2)
        else:
            first, second = slice(0, rotated // 2), slice(rotated // 2, rotated)
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos + -b * sin, b * cos + a * sin
        return out

    return turn(q), turn(k)


CASES = {"rope": cases}
REFERENCES = {"rope": rope}
RECIPES = {"rope": recipe}


def _other_pairs(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return rope(q, k, positions, table, not interleaved)


def _last_channels(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    rotated = table.shape[-1]
    turned = rope(q.roll(rotated, -1), k.roll(rotated, -1), positions, table, interleaved)
    return turned[0].roll(-rotated, -1), turned[1].roll(-rotated, -1)


def _backwards(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    cos, sin = table.chunk(2, dim=-1)
    return rope(q, k, positions, torch.cat((cos, -sin), dim=-1), interleaved)


MISTAKES = {
    "rope": {
        "rope half": (_other_pairs, _last_channels),
        "rope direction": (_backwards,),
        "rope position": (
            lambda q, k, p, *more, **pairs: rope(q, k, (p - 1).clamp_min(0), *more, **pairs),
        ),
    }
}
