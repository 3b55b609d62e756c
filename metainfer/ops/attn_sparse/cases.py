"""Cases of `attn_sparse`: window borders, short and empty selections, strong and absent sinks.

Tokens that the window has left behind, entries that nobody chose and foreign pages are poison; the
table of the window holds -1 before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.kv.store.entries import EntryPages, gather, locate
from metainfer.ops.attn_sparse.ref import attn_sparse, chosen
from metainfer.ops.case import Case, generator, normal
from metainfer.ops.case_caches import Entries, Form, paged
from metainfer.ops.common import rotate_tail, wide
from metainfer.ops.rope.tables import RopeSpec, cos_sin, unturned

DECODING = frozenset({Phase.MIXED, Phase.DECODE, Phase.VERIFY})
PREFILL = frozenset({Phase.CHUNK, Phase.MIXED})


@dataclass(frozen=True, slots=True)
class Layout:
    """(queries, context) per sequence, and the sizes. `top_k` 0: all visible entries; `page` in
    tokens."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    hq: int = 4
    d: int = 32
    rotated: int = 8
    window: int = 8
    ratio: int = 4
    top_k: int = 3
    sink: float = 0.0
    page: int = 16
    padding: int = 0
    phases: frozenset[Phase] = PREFILL


LAYOUTS = (
    Layout("first-token", ((1, 1),), phases=DECODING),
    Layout("decode-borders", ((1, 7), (1, 8), (1, 9), (1, 40)), phases=DECODING),
    Layout("decode-around-k", ((1, 11), (1, 12), (1, 15), (1, 19)), page=64, phases=DECODING),
    Layout("decode-all", ((1, 40), (1, 3), (1, 16)), ratio=16, top_k=0, phases=DECODING),
    Layout("decode-window-only", ((1, 40), (1, 3)), ratio=0, phases=DECODING),
    Layout("decode-idle-padded", ((0, 9), (1, 30), (0, 2)), padding=2, phases=DECODING),
    Layout("decode-wide", ((1, 300),), hq=64, d=512, rotated=64, window=128, top_k=32, page=256,
           phases=DECODING),
    Layout("decode-wide-parts", ((1, 260), (1, 77)) * 20, hq=64, d=512, rotated=64, window=128,
           top_k=0, page=256, phases=DECODING),
    Layout("verify", ((3, 33), (2, 2), (8, 70)), page=64, phases=DECODING),
    Layout("prompt", ((21, 21),)),
    Layout("prompt-all", ((26, 26),), ratio=8, top_k=0),
    Layout("chunk-long", ((40, 90),), top_k=5, page=64),
    Layout("chunks", ((9, 50), (5, 12)), top_k=6, page=256),
    Layout("chunk-few-of-many", ((12, 400), (1, 90)), top_k=4, page=64),
    Layout("chunk-wide", ((66, 560), (4, 40)), hq=64, d=512, rotated=64, window=20, top_k=130,
           page=64, padding=1),
    Layout("chunk-window-only", ((20, 33),), ratio=0),
    Layout("chunk-decoded", ((40, 90), (30, 75)), d=128, rotated=64, window=16, top_k=6),
    Layout("chunk-decoded-all", ((40, 90), (0, 9), (33, 33)), d=128, rotated=64, ratio=16, top_k=0),
    Layout("chunk-decoded-window", ((40, 90),), d=128, rotated=64, ratio=0),
    Layout("strong-sink", ((5, 30),), sink=20.0),
    Layout("weak-sink-odd", ((5, 30),), hq=3, d=26, rotated=10, window=5, ratio=2, sink=-40.0),
)  # fmt: skip


@dataclass(slots=True)
class _Drawn:
    """What the caches hold, and where."""

    tokens: Tensor
    local_table: Tensor
    entries: Tensor
    entry_table: Tensor
    picks: Tensor
    positions: Tensor


def _draw(layout: Layout, g: torch.Generator) -> _Drawn:
    d, ratio, window = layout.d, layout.ratio, layout.window
    contexts = [context for _, context in layout.sequences]
    per_page = layout.page // ratio if ratio else 1
    rows = sum(n for n, _ in layout.sequences) + layout.padding
    local_table, pages = paged(g, contexts, layout.page)
    counts = [context // ratio if ratio else 0 for context in contexts]
    entry_table, entry_pages = paged(g, counts, per_page)
    drawn = _Drawn(
        torch.full((pages * layout.page, d), torch.nan, dtype=torch.float64),
        local_table,
        torch.full((entry_pages * per_page, d), torch.nan, dtype=torch.float64),
        entry_table,
        torch.full((rows, max(layout.top_k, 1)), -1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
    )
    row = 0
    for s, (n, context) in enumerate(layout.sequences):
        first = max(0, context - n - window + 1)
        near = torch.arange(first, context)
        drawn.tokens[locate(local_table[s], layout.page, near)] = normal(g, len(near), d)
        local_table[s, : first // layout.page] = -1
        for t in range(context - n, context):
            drawn.positions[row] = t
            seen = (t + 1) // ratio if ratio else 0
            mine = torch.randperm(seen, generator=g)
            if layout.top_k:
                mine = mine[: layout.top_k]
                drawn.picks[row, : len(mine)] = mine.int()
            drawn.entries[locate(entry_table[s], per_page, mine)] = normal(g, len(mine), d)
            row += 1
    return drawn


def build(layout: Layout, seed: int) -> Case:
    g = generator(seed)
    drawn, ratio = _draw(layout, g), layout.ratio
    queries = [n for n, _ in layout.sequences]
    contexts = [context for _, context in layout.sequences]
    rows = sum(queries)
    sparse, form = ratio > 0 and layout.top_k > 0, Form("kv", layout.d, layout.rotated)
    return Case(
        op="attn_sparse",
        name=layout.name,
        args=(
            normal(g, rows + layout.padding, layout.hq, layout.d),
            Entries(form, drawn.tokens, layout.page),
            drawn.local_table,
            Entries(form, drawn.entries, layout.page // ratio) if ratio else None,
            drawn.entry_table if ratio else None,
            drawn.picks if sparse else None,
            (normal(g, layout.hq) + layout.sink).float(),
            cos_sin(RopeSpec(rotated=layout.rotated), max(contexts)),
            drawn.positions,
            torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
        ),
        kwargs={"scale": layout.d**-0.5, "window": layout.window, "ratio": ratio},
        shape={
            "rows": rows + layout.padding,
            "seqs": len(contexts),
            "hq": layout.hq,
            "d": layout.d,
            "rotated": layout.rotated,
            "window": layout.window,
            "ratio": ratio,
            "top_k": layout.top_k,
            "context": max(contexts),
        },
        semantics=frozenset({"selected"} if sparse else {"entries"} if ratio else ()),
        phases=layout.phases,
        rows=rows,
    )


def _foreign(name: str, *sequences: tuple[int, int], ratio: int = 4, top_k: int = 0) -> Layout:
    return Layout(
        name, sequences, hq=64, d=512, rotated=64, window=128, ratio=ratio, top_k=top_k, page=64
    )


FOREIGN_LAYOUTS = (
    _foreign("foreign-1", (1, 300), top_k=32),
    _foreign("foreign-64", (40, 90), (0, 9), (24, 300), ratio=16),
    _foreign("foreign-256", (256, 600), top_k=96),
    _foreign("foreign-window", (66, 90), ratio=0),
)


def foreign_cases(seed: int) -> list[Case]:
    """For libraries of others: 1, 64 and 256 rows, where their forms differ."""
    return [build(layout, seed + index) for index, layout in enumerate(FOREIGN_LAYOUTS)]


def cases(seed: int) -> list[Case]:
    return [build(layout, seed + index) for index, layout in enumerate(LAYOUTS)]


def recipe(
    q: Tensor,
    local: EntryPages,
    local_table: Tensor,
    entries: EntryPages | None,
    entry_table: Tensor | None,
    selected: Tensor | None,
    sinks: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
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
    for s in range(len(context_lens)):
        for row in range(starts[s], starts[s + 1]):
            t = int(positions[row])
            near = torch.arange(max(0, t - window + 1), t + 1)
            keys = gather(local, locate(local_table[s], local.entries, near))
            if entries is not None and entry_table is not None and ratio:
                picked = None if selected is None else selected[row : row + 1]
                mask = chosen(positions[row : row + 1], picked, (t + 1) // ratio, ratio)[0]
                mine = locate(entry_table[s], entries.entries, mask.nonzero().squeeze(1))
                keys = torch.cat((keys, gather(entries, mine)))
            logits = wide(q[row]) @ keys.to(wide(q).dtype).T * scale  # [Hq, L]
            sink = sinks.to(logits.dtype).unsqueeze(1)
            weights = torch.softmax(torch.cat((logits, sink), dim=-1), dim=-1)[:, :-1].to(q.dtype)
            mixed = (wide(weights) @ keys.to(wide(q).dtype)).to(q.dtype)
            out[row] = rotate_tail(wide(mixed), cos_sin[t], inverse=True).to(q.dtype)
    return out


CASES = {"attn_sparse": cases}
FOREIGN = {"attn_sparse": foreign_cases}
REFERENCES = {"attn_sparse": attn_sparse}
RECIPES = {"attn_sparse": recipe}


def _with(**changes: Callable[[Any], Any]) -> Callable[..., Tensor]:
    """The reference with some arguments changed."""
    names = tuple(signature(attn_sparse).parameters)

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        return attn_sparse(**given | {key: change(given[key]) for key, change in changes.items()})

    return wrong


MISTAKES = {
    "attn_sparse": {
        "window edge": (_with(window=lambda w: w + 1), _with(window=lambda w: w - 1)),
        "sink": (_with(sinks=lambda s: torch.full_like(s, float("-inf"))),),
        "sparse selection": (_with(selected=lambda s: None),),
        "inverse rope": (_with(cos_sin=unturned),),
        "scale": (_with(scale=lambda s: 1.0),),
    }
}
