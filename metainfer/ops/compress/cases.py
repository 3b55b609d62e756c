"""Cases of the compressors: chunks that begin and end inside windows, idle sequences, padding.

Entries that nobody closes and raw rows that nobody needs are poison, pages lie in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.kv.book.form import plain
from metainfer.kv.store.entries import EntryPages, StateRows, gather, store
from metainfer.ops.case import Case, generator, normal
from metainfer.ops.case_caches import Entries, Form, Rows, Single, paged
from metainfer.ops.common import hadamard, rotate_tail
from metainfer.ops.compress.ref import compress
from metainfer.ops.rope.tables import RopeSpec, cos_sin, unturned


@dataclass(frozen=True, slots=True)
class Layout:
    """(queries, context) per sequence, and the sizes; `page` in tokens."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    ratio: int = 4
    overlap: bool = True
    d: int = 32
    rotated: int = 8
    spare: int = 8  # rows beyond those that windows need
    page: int = 16
    padding: int = 0  # rows of no sequence
    padded: int = 0  # sequences of the padding line


LAYOUTS = (
    Layout("first-token", ((1, 1),)),
    Layout("first-window", ((4, 4),)),
    Layout("prompt", ((19, 19),)),
    Layout("prompt-long", ((150, 150),), page=64),
    Layout("chunk-inside", ((3, 7), (2, 6)), page=256),
    Layout("chunk-across", ((9, 26), (1, 8), (1, 9)), page=64),
    Layout("decode-closing", ((1, 4), (1, 8), (1, 40), (1, 41)), padded=2),
    Layout("verify", ((8, 20), (5, 5), (3, 39))),
    Layout("idle-padded", ((0, 12), (5, 17), (0, 3)), padding=3),
    Layout("nothing", ((0, 5),)),
    Layout("narrow", ((6, 21), (1, 12)), d=16, rotated=4, spare=0),
    Layout("apart", ((20, 37), (1, 16), (1, 17)), ratio=8, overlap=False, spare=0),
    Layout("apart-128", ((150, 270), (1, 128), (3, 256)), 128, False, 16, page=256, padded=1),
    Layout("apart-4", ((7, 7), (2, 10)), overlap=False, spare=5),
)


def build(op: str, role: str, layout: Layout, seed: int) -> Case:
    g = generator(seed)
    d, ratio, count = layout.d, layout.ratio, len(layout.sequences)
    wide = 2 if layout.overlap else 1
    per_page = layout.page // ratio
    sequences = layout.sequences + ((1, 1),) * layout.padded
    queries = [n for n, _ in sequences]
    contexts = [context for _, context in sequences]
    rows = sum(queries) + layout.padding
    table, pages = paged(g, [context // ratio for _, context in layout.sequences], per_page)
    ring = torch.full((count + 2, 2, ratio * wide + layout.spare, wide * d), torch.nan).double()
    lines = torch.cat((torch.randperm(count + 1, generator=g)[:count], torch.tensor([count + 1])))
    lines = lines[torch.arange(len(sequences)).clamp_max(count)]
    slots, row = torch.full((rows,), -1), 0
    for s, (n, context) in enumerate(layout.sequences):
        low = max((context - n) // ratio - (wide - 1), 0) * ratio
        kept = torch.arange(low, context - n) % ring.shape[2]
        ring[lines[s], :, kept] = normal(g, 2, len(kept), wide * d)
        for t in range(context - n, context):
            if (t + 1) % ratio == 0:
                w = t // ratio
                slots[row] = table[s, w // per_page] * per_page + w % per_page
            row += 1
    values, gates = normal(g, rows, wide * d), normal(g, rows, wide * d, scale=2.0)
    for part in (values, gates):  # padded sequences share a line: the last writer is any of them
        part[row : row + layout.padded] = part[row : row + layout.padded][:1].clone()
    args: tuple[Any, ...] = (
        Single(values),
        Single(gates),
        normal(g, ratio, wide * d).float(),
        (normal(g, d) + 1).float(),
        cos_sin(RopeSpec(rotated=layout.rotated), max(contexts) + 1),
        Rows(ring),
        lines,
        Entries(
            Form(role, d, layout.rotated),
            torch.full((pages * per_page, d), torch.nan, dtype=torch.float64),
            per_page,
        ),
        slots,
        torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
    )
    return Case(
        op=op,
        name=layout.name,
        args=args,
        kwargs={"ratio": ratio, "overlap": layout.overlap, "eps": 1e-6},
        shape={
            "rows": rows,
            "seqs": len(sequences),
            "d": d,
            "rotated": layout.rotated,
            "ratio": ratio,
        },
        semantics=frozenset({"overlap"} if layout.overlap else ()),
        outputs=(5, 7),
    )


def cases(seed: int) -> list[Case]:
    return [build("compress", "kv", layout, seed + i) for i, layout in enumerate(LAYOUTS)]


def index_cases(seed: int) -> list[Case]:
    return [build("compress_index", "index", layout, seed + i) for i, layout in enumerate(LAYOUTS)]


def recipe(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    weight: Tensor,
    cos_sin: Tensor,
    state: StateRows,
    lines: Tensor,
    pages: EntryPages,
    slots: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    **kwargs: Any,
) -> None:
    """The published code rounds after the norm, and once more after the rotation."""
    d, ratio = pages.form.width, int(kwargs["ratio"])
    kind = pages.data.dtype if pages.form.scale == "none" else kv.dtype
    form = plain("latent@1", d, str(kind).removeprefix("torch."))
    data = torch.zeros(pages.data.shape[0], pages.entries, d, dtype=kind)
    normed = EntryPages(group=0, data=data, form=form, entries=pages.entries)
    flat = unturned(cos_sin)
    compress(
        kv, gate, ape, weight, flat, state, lines, normed, slots, query_start, context_lens,
        **kwargs,
    )  # fmt: skip
    starts = query_start.tolist()
    for s, context in enumerate(context_lens.tolist()):
        rows = torch.arange(starts[s], starts[s + 1])
        rows = rows[slots[rows] >= 0]
        first = context - starts[s + 1] + rows - (ratio - 1)
        values = rotate_tail(gather(normed, slots[rows]), cos_sin[first])
        store(pages, slots[rows], hadamard(values) if pages.form.hadamard else values)


CASES = {"compress": cases, "compress_index": index_cases}
REFERENCES = {"compress": compress, "compress_index": compress}
RECIPES = {"compress": recipe, "compress_index": recipe}


def _unbiased(kv: Tensor, gate: Tensor, ape: Tensor, *more: Any, **kwargs: Any) -> None:
    compress(kv, gate, torch.zeros_like(ape), *more, **kwargs)


def _unturned(
    kv: Tensor, gate: Tensor, ape: Tensor, w: Tensor, table: Tensor, *m: Any, **k: Any
) -> None:
    compress(kv, gate, ape, w, unturned(table), *m, **k)


MISTAKES = {
    op: {"gate bias": (_unbiased,), "rope": (_unturned,)} for op in ("compress", "compress_index")
}
