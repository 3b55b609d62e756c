"""Cases of the indexer: ties at 0, short rows, borders of windows, unread keys (poison), padding.

`index_select` gets small multiples of powers of two that every form holds exactly, so scores are
exact in every dtype and rounding cannot turn a choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.kv.book.form import EntryForm
from metainfer.kv.store.entries import EntryPages, gather, locate
from metainfer.kv.store.entry_codecs import rounded
from metainfer.ops.case import Case, generator, integers, normal
from metainfer.ops.case_caches import Entries, Form, paged
from metainfer.ops.common import hadamard, rotate_tail, wide
from metainfer.ops.indexer.ref import index_query, index_select, scores
from metainfer.ops.rope.tables import RopeSpec, cos_sin

#: A key's largest value: over 448 it is a power of two, so that no form's scale is rounded.
LARGEST = 1.75

#: (rows, heads, d, rotated)
QUERIES = ((0, 4, 32, 8), (1, 1, 64, 4), (5, 3, 32, 8), (3, 64, 128, 64), (7, 1, 16, 4))


@dataclass(frozen=True, slots=True)
class Layout:
    """(queries, context) per sequence, and the sizes; `page` in tokens."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    d: int = 16
    ratio: int = 4
    top_k: int = 3
    page: int = 16
    padding: int = 0


LAYOUTS = (
    Layout("nothing-to-see", ((1, 1), (3, 3))),
    Layout("one-entry", ((1, 4), (2, 7)), top_k=1),
    Layout("prompt", ((40, 40),)),
    Layout("around-k", ((1, 11), (1, 12), (1, 15), (1, 16), (1, 19))),
    Layout("short-rows", ((9, 30), (1, 15), (1, 16)), top_k=7, page=64),
    Layout("decode-borders", ((1, 11), (1, 12), (1, 13), (1, 100)), page=256),
    Layout("verify", ((8, 60), (3, 31), (1, 7))),
    Layout("one-head", ((1, 60), (5, 61)), heads=1, d=8),
    Layout("idle-padded", ((0, 12), (5, 37), (0, 3)), padding=3),
    Layout("ratio-1", ((3, 30),), ratio=1, top_k=8),
    Layout("wide", ((4, 300), (1, 90)), heads=64, d=128, top_k=16, page=64),
)


def query_cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for rows, heads, d, rotated in QUERIES:
        x = normal(g, rows, heads, d)
        if rows > 2:
            x[1] = 0
            x[2] *= 1e-3
        found.append(
            Case(
                op="index_query",
                name=f"{rows}x{heads}x{d}-{rotated}",
                args=(
                    x,
                    integers(g, 200, rows),
                    cos_sin(RopeSpec(rotated=rotated), 200),
                    Form("index", d),
                ),
                shape={"rows": rows, "heads": heads, "d": d, "rotated": rotated},
            )
        )
    return found


def build(layout: Layout, seed: int) -> Case:
    g = generator(seed)

    def exact(steps: int, unit: float, *shape: int) -> Tensor:
        return (integers(g, 2 * steps + 1, *shape) - steps).double() * unit

    ratio, per_page = layout.ratio, layout.page // layout.ratio
    queries = [n for n, _ in layout.sequences]
    contexts = [context for _, context in layout.sequences]
    rows = sum(queries) + layout.padding
    table, pages = paged(g, [context // ratio for context in contexts], per_page)
    keys = torch.full((pages * per_page, layout.d), torch.nan, dtype=torch.float64)
    positions, row = torch.zeros(rows, dtype=torch.int64), 0
    for s, (n, context) in enumerate(layout.sequences):
        w = torch.arange(context // ratio)
        slots = table[s, w // per_page] * per_page + w % per_page
        found = exact(3, 0.5, len(w), layout.d)
        found[:, 0] = LARGEST * (2.0 * integers(g, 2, len(w)) - 1)
        keys[slots.long()] = found
        if n == 1 and len(w) > 2:
            keys[slots[1].long()] = keys[slots[0].long()]
        positions[row : row + n] = torch.arange(context - n, context)
        row += n
    q, weights = exact(3, 0.25, rows, layout.heads, layout.d), exact(4, 0.25, rows, layout.heads)
    if rows > 2:
        q[1] = 0  # every entry ties at 0
    return Case(
        op="index_select",
        name=layout.name,
        args=(
            q,
            weights,
            Entries(Form("index", layout.d), keys, per_page),
            table,
            positions,
            torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
        ),
        kwargs={"ratio": ratio, "top_k": layout.top_k, "scale": 2.0**-5},
        shape={
            "rows": rows,
            "seqs": len(contexts),
            "heads": layout.heads,
            "d": layout.d,
            "ratio": ratio,
            "top_k": layout.top_k,
            "context": max(contexts),
        },
    )


def select_cases(seed: int) -> list[Case]:
    return [build(layout, seed + index) for index, layout in enumerate(LAYOUTS)]


def query_recipe(q: Tensor, positions: Tensor, cos_sin: Tensor, form: EntryForm) -> Tensor:
    """The published code rounds to the dtype after the rotation and after the Hadamard product."""
    q = rotate_tail(wide(q), cos_sin[positions].unsqueeze(1)).to(q.dtype)
    if form.hadamard:
        q = hadamard(wide(q)).to(q.dtype)
    return rounded(form, q)


def select_recipe(*args: Any, **kwargs: Any) -> Tensor:
    return index_select(*args, **kwargs)


def _last_of_ties(
    q: Tensor,
    g: Tensor,
    pages: EntryPages,
    page_table: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    ratio: int,
    top_k: int,
    scale: float,
) -> Tensor:
    """Equal scores go to the later entry."""
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32)
    for s, context in enumerate(context_lens.tolist()):
        rows = range(int(query_start[s]), int(query_start[s + 1]))
        keys = gather(pages, locate(page_table[s], pages.entries, torch.arange(context // ratio)))
        for row in rows:
            seen = (int(positions[row]) + 1) // ratio
            value = scores(q[row : row + 1], g[row : row + 1], keys[:seen], scale)[0].flip(0)
            best = torch.sort(value, descending=True, stable=True).indices[:top_k]
            chosen = (seen - 1 - best).sort().values
            out[row, : len(chosen)] = chosen.int()
    return out


def _one_less(*args: Any, top_k: int, **kwargs: Any) -> Tensor:
    """The last of the best is left out."""
    out = index_select(*args, top_k=top_k, **kwargs)
    short = index_select(*args, top_k=max(top_k - 1, 1), **kwargs)
    out[:, : short.shape[1]], out[:, short.shape[1] :] = short, -1
    return out


CASES = {"index_query": query_cases, "index_select": select_cases}
REFERENCES = {"index_query": index_query, "index_select": index_select}
RECIPES = {"index_query": query_recipe, "index_select": select_recipe}
MISTAKES = {"index_select": {"tie order": (_last_of_ties,), "top-k": (_one_less,)}}
