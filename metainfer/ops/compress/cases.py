"""Cases of `compress`: chunks that begin and end inside windows, idle sequences, padded rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.ops.case import Case, generator, normal
from metainfer.ops.common import wide
from metainfer.ops.compress.ref import compress
from metainfer.ops.rope.tables import RopeSpec, cos_sin

UNTOUCHED = 3.0


@dataclass(frozen=True, slots=True)
class Layout:
    """(queries, context) per sequence, and the sizes."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    ratio: int = 4
    overlap: bool = True
    d: int = 32
    rotated: int = 8
    ring: int = 0  # rows beyond those that windows need
    padding: int = 0


LAYOUTS = (
    Layout("first-token", ((1, 1),)),
    Layout("first-window", ((4, 4),)),
    Layout("prompt", ((19, 19),)),
    Layout("chunk-inside", ((3, 7), (2, 6))),
    Layout("chunk-across", ((9, 26), (1, 8), (1, 9)), ring=8),
    Layout("decode-closing", ((1, 4), (1, 8), (1, 40), (1, 41))),
    Layout("idle-padded", ((0, 12), (5, 17), (0, 3)), padding=3),
    Layout("nothing", ((0, 5),)),
    Layout("apart", ((20, 37), (1, 16), (1, 17)), ratio=8, overlap=False),
    Layout("apart-128", ((150, 270), (1, 128), (3, 256)), ratio=128, overlap=False, d=16),
    Layout("apart-odd", ((7, 7), (2, 10)), ratio=3, overlap=False, d=10, rotated=2, ring=5),
)


def build(layout: Layout, seed: int) -> Case:
    g = generator(seed)
    d, ratio, count = layout.d, layout.ratio, len(layout.sequences)
    width = d * (2 if layout.overlap else 1)
    ring = ratio * (2 if layout.overlap else 1) + layout.ring
    queries = [n for n, _ in layout.sequences]
    contexts = [context for _, context in layout.sequences]
    rows = sum(queries)
    # Lines of the caches: one more than sequences, in another order.
    slots = torch.randperm(count + 1, generator=g)[:count]
    most = max(contexts) // ratio + 1
    args: tuple[Any, ...] = (
        normal(g, rows + layout.padding, width),
        normal(g, rows + layout.padding, width, scale=2.0),
        normal(g, ratio, width).float(),
        (normal(g, d) + 1).float(),
        cos_sin(RopeSpec(rotated=layout.rotated), max(contexts) + 1),
        normal(g, count + 1, 2, ring, width).float(),
        torch.full((count + 1, most, d), UNTOUCHED, dtype=torch.float64),
        slots,
        torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
    )
    return Case(
        op="compress",
        name=layout.name,
        args=args,
        kwargs={"ratio": ratio, "overlap": layout.overlap, "eps": 1e-6},
        shape={"rows": rows + layout.padding, "seqs": count, "d": d, "ratio": ratio},
        semantics=frozenset({"overlap"} if layout.overlap else ()),
        outputs=(5, 6),
    )


def cases(seed: int) -> list[Case]:
    return [build(layout, seed + index) for index, layout in enumerate(LAYOUTS)]


def recipe(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    weight: Tensor,
    cos_sin: Tensor,
    state: Tensor,
    cache: Tensor,
    *rest: Tensor,
    **kwargs: Any,
) -> None:
    """The published code rounds after the norm, and once more after the rotation."""
    unturned = cos_sin.clone()
    half = unturned.shape[-1] // 2
    unturned[:, :half], unturned[:, half:] = 1.0, 0.0
    compress(kv, gate, ape, weight, unturned, state, cache, *rest, **kwargs)
    slots, starts, contexts = (t.tolist() for t in rest)
    ratio = int(kwargs["ratio"])
    for s, slot in enumerate(slots):
        opened = (contexts[s] - (starts[s + 1] - starts[s])) // ratio
        closed = contexts[s] // ratio
        if opened < closed:
            turn = cos_sin[torch.arange(opened, closed) * ratio]
            cos, sin = turn.to(wide(cache).dtype).chunk(2, dim=-1)
            tail = wide(cache[slot, opened:closed, -2 * half :])
            pairs = torch.view_as_complex(tail.reshape(*tail.shape[:-1], half, 2).contiguous())
            pairs = pairs * torch.complex(cos, sin)
            turned = torch.view_as_real(pairs).flatten(-2)
            cache[slot, opened:closed, -2 * half :] = turned.to(cache.dtype)


CASES = {"compress": cases}
REFERENCES = {"compress": compress}
RECIPES = {"compress": recipe}
