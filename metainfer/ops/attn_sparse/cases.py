"""Cases of `attn_sparse`: window borders, short and empty selections, strong and absent sinks.

Tokens that the window has left behind, entries that nobody chose and foreign lines hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.ops.attn_sparse.ref import attn_sparse, chosen
from metainfer.ops.case import Case, generator, normal
from metainfer.ops.common import rotate_tail, wide
from metainfer.ops.rope.tables import RopeSpec, cos_sin

DECODING = frozenset({Phase.MIXED, Phase.DECODE, Phase.VERIFY})
PREFILL = frozenset({Phase.CHUNK, Phase.MIXED})


@dataclass(frozen=True, slots=True)
class Layout:
    """(queries, context) per sequence, and the sizes. `top_k` 0: all visible entries."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    hq: int = 4
    d: int = 32
    rotated: int = 8
    window: int = 8
    ratio: int = 4
    top_k: int = 3
    sink: float = 0.0
    padding: int = 0
    phases: frozenset[Phase] = PREFILL


LAYOUTS = (
    Layout("first-token", ((1, 1),), phases=DECODING),
    Layout("decode-borders", ((1, 7), (1, 8), (1, 9), (1, 40)), phases=DECODING),
    Layout("decode-all", ((1, 40), (1, 3), (1, 16)), ratio=16, top_k=0, phases=DECODING),
    Layout("decode-window-only", ((1, 40), (1, 3)), ratio=0, phases=DECODING),
    Layout("decode-idle-padded", ((0, 9), (1, 30), (0, 2)), padding=2, phases=DECODING),
    Layout("decode-wide", ((1, 300),), hq=64, d=512, rotated=64, window=128, top_k=32,
           phases=DECODING),
    Layout("verify", ((3, 33), (2, 2)), phases=DECODING),
    Layout("prompt", ((37, 37),)),
    Layout("prompt-all", ((40, 40),), ratio=8, top_k=0),
    Layout("chunks", ((9, 50), (5, 12)), top_k=6),
    Layout("chunk-window-only", ((20, 33),), ratio=0),
    Layout("strong-sink", ((5, 30),), sink=20.0),
    Layout("weak-sink-odd", ((5, 30),), hq=3, d=10, rotated=2, window=5, ratio=3, sink=-40.0),
)  # fmt: skip


def build(layout: Layout, seed: int) -> Case:
    g = generator(seed)
    count, d, ratio, window = len(layout.sequences), layout.d, layout.ratio, layout.window
    queries = [n for n, _ in layout.sequences]
    contexts = [context for _, context in layout.sequences]
    rows = sum(queries)
    slots = torch.randperm(count + 1, generator=g)[:count]
    tokens = torch.full((count + 1, max(contexts) + 1, d), float("nan"), dtype=torch.float64)
    width = max(contexts) // ratio + 1 if ratio else 0
    entries = torch.full((count + 1, width, d), float("nan"), dtype=torch.float64)
    picks = torch.full((rows + layout.padding, max(layout.top_k, 1)), -1, dtype=torch.int32)
    row = 0
    for slot, n, context in zip(slots.tolist(), queries, contexts, strict=True):
        first = max(0, context - n - window + 1)
        tokens[slot, first:context] = normal(g, context - first, d)
        for t in range(context - n, context):
            seen = (t + 1) // ratio if ratio else 0
            mine = torch.randperm(seen, generator=g)
            if layout.top_k:
                mine = mine[: layout.top_k]
                picks[row, : len(mine)] = mine.int()
            entries[slot, mine] = normal(g, len(mine), d)
            row += 1
    sparse = ratio > 0 and layout.top_k > 0
    return Case(
        op="attn_sparse",
        name=layout.name,
        args=(
            normal(g, rows + layout.padding, layout.hq, d),
            tokens,
            entries if ratio else None,
            picks if sparse else None,
            (normal(g, layout.hq) + layout.sink).float(),
            cos_sin(RopeSpec(rotated=layout.rotated), max(contexts)),
            slots,
            torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
        ),
        kwargs={"scale": d**-0.5, "window": window, "ratio": ratio},
        shape={
            "rows": rows + layout.padding,
            "seqs": count,
            "hq": layout.hq,
            "d": d,
            "window": window,
            "ratio": ratio,
            "top_k": layout.top_k,
            "context": max(contexts),
        },
        semantics=frozenset({"selected"} if sparse else {"entries"} if ratio else ()),
        phases=layout.phases,
        rows=rows,
    )


def cases(seed: int) -> list[Case]:
    return [build(layout, seed + index) for index, layout in enumerate(LAYOUTS)]


def recipe(
    q: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    selected: Tensor | None,
    sinks: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int,
    ratio: int,
) -> Tensor:
    """Query by query: softmax float32, weights and mix rounded to the dtype, then the rotation."""
    out = torch.zeros_like(q)
    starts = query_start.tolist()
    for s, (slot, context) in enumerate(zip(slots.tolist(), context_lens.tolist(), strict=True)):
        for row in range(starts[s], starts[s + 1]):
            t = context - starts[s + 1] + row
            keys = tokens[slot, max(0, t - window + 1) : t + 1]
            if entries is not None and ratio:
                picked = None if selected is None else selected[row : row + 1]
                mask = chosen(torch.tensor([t]), picked, (t + 1) // ratio, ratio)[0]
                keys = torch.cat((keys, entries[slot, : (t + 1) // ratio][mask]))
            logits = wide(q[row]) @ wide(keys).T * scale  # [Hq, L]
            sink = sinks.to(logits.dtype).unsqueeze(1)
            weights = torch.softmax(torch.cat((logits, sink), dim=-1), dim=-1)[:, :-1].to(q.dtype)
            mixed = (wide(weights) @ wide(keys)).to(q.dtype)
            out[row] = rotate_tail(wide(mixed), cos_sin[t], inverse=True).to(q.dtype)
    return out


CASES = {"attn_sparse": cases}
REFERENCES = {"attn_sparse": attn_sparse}
RECIPES = {"attn_sparse": recipe}
