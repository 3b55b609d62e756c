"""Cases of the indexer: ties at 0, short rows, borders of windows, unread keys (NaN), padding.

`index_select` gets small multiples of powers of two, so scores are exact in every dtype. With
rounding to e2m1, `index_rotate` is compared bit for bit: next to a border any other order of the
butterflies may land on the other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.ops.case import Case, generator, integers, normal
from metainfer.ops.common import rotate_tail, wide
from metainfer.ops.indexer.ref import hadamard, index_rotate, index_select
from metainfer.ops.rope.tables import RopeSpec, cos_sin

#: (rows, heads, d, rotated; 0: keys, which are rotated already)
ROTATIONS = ((0, 4, 32, 8), (1, 1, 64, 0), (5, 3, 32, 8), (3, 64, 128, 64), (7, 1, 16, 0))


@dataclass(frozen=True, slots=True)
class Layout:
    """(queries, context) per sequence, and the sizes."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    d: int = 16
    ratio: int = 4
    top_k: int = 3
    padding: int = 0


LAYOUTS = (
    Layout("nothing-to-see", ((1, 1), (3, 3))),
    Layout("prompt", ((40, 40),)),
    Layout("short-rows", ((9, 30), (1, 15), (1, 16)), top_k=7),
    Layout("decode-borders", ((1, 11), (1, 12), (1, 13), (1, 100))),
    Layout("one-head", ((1, 60), (5, 61)), heads=1, d=8),
    Layout("idle-padded", ((0, 12), (5, 37), (0, 3)), padding=3),
    Layout("ratio-1", ((3, 30),), ratio=1, top_k=8),
    Layout("wide", ((4, 300),), heads=64, d=128, top_k=16),
)


def rotate_cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, heads, d, rotated in ROTATIONS:
        x = normal(g, rows, heads, d)
        if rows > 2:
            x[1] = 0
            x[2] *= 1e-3
        table = cos_sin(RopeSpec(rotated=rotated), 200) if rotated else None
        positions = integers(g, 200, rows) if rotated else None
        for fp4 in (False, True):
            found.append(
                Case(
                    op="index_rotate",
                    name=f"{rows}x{heads}x{d}-{rotated}{'-fp4' * fp4}",
                    args=(x, positions, table),
                    kwargs={"fp4": fp4},
                    shape={"rows": rows, "heads": heads, "d": d, "rotated": rotated},
                    semantics=frozenset({"fp4"} if fp4 else ()),
                    exact=fp4,
                )
            )
    return found


def build(layout: Layout, seed: int) -> Case:
    g = generator(seed)

    def exact(steps: int, unit: float, *shape: int) -> Tensor:
        return (integers(g, 2 * steps + 1, *shape) - steps).double() * unit

    count = len(layout.sequences)
    queries = [n for n, _ in layout.sequences]
    contexts = [context for _, context in layout.sequences]
    rows = sum(queries) + layout.padding
    slots = torch.randperm(count + 1, generator=g)[:count]
    keys = torch.full(
        (count + 1, max(contexts) // layout.ratio + 2, layout.d), float("nan"), dtype=torch.float64
    )
    for slot, context in zip(slots.tolist(), contexts, strict=True):
        keys[slot, : context // layout.ratio] = exact(3, 0.5, context // layout.ratio, layout.d)
    q, weights = exact(3, 0.25, rows, layout.heads, layout.d), exact(4, 0.25, rows, layout.heads)
    if rows > 2:
        q[1] = 0  # every entry ties at 0
    return Case(
        op="index_select",
        name=layout.name,
        args=(
            q,
            weights,
            keys,
            slots,
            torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
        ),
        kwargs={"ratio": layout.ratio, "top_k": layout.top_k, "scale": 2.0**-5},
        shape={
            "rows": rows,
            "seqs": count,
            "heads": layout.heads,
            "d": layout.d,
            "ratio": layout.ratio,
            "top_k": layout.top_k,
            "context": max(contexts),
        },
    )


def select_cases(seed: int) -> list[Case]:
    return [build(layout, seed + index) for index, layout in enumerate(LAYOUTS)]


def rotate_recipe(
    x: Tensor, positions: Tensor | None, table: Tensor | None, *, fp4: bool
) -> Tensor:
    """The published code rounds after the rotation and after the Hadamard product."""
    if positions is not None and table is not None:
        x = rotate_tail(wide(x), table[positions].unsqueeze(1)).to(x.dtype)
    return hadamard(wide(x)).to(x.dtype)


def select_recipe(*args: Any, **kwargs: Any) -> Tensor:
    return index_select(*args, **kwargs)


CASES = {"index_rotate": rotate_cases, "index_select": select_cases}
REFERENCES = {"index_rotate": index_rotate, "index_select": index_select}
RECIPES = {"index_rotate": rotate_recipe, "index_select": select_recipe}
