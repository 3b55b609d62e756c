"""Cases of the ops of a dealt cache: empty parts, lone keys, ties over ranks, sinks, padding.

Entries and keys that nobody lists are poison. Scores of the choice are exact in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, gather, locate
from metainfer.ops.attn_paged.ref import gather as gather_rows
from metainfer.ops.case import Case, generator, integers, normal
from metainfer.ops.case_caches import Entries, Form, Single, paged
from metainfer.ops.common import wide
from metainfer.ops.dealt.empty import EMPTY
from metainfer.ops.dealt.ref import (
    attn_paged_part,
    attn_part,
    attn_weigh,
    index_merge,
    index_part,
)
from metainfer.ops.rope.tables import RopeSpec, cos_sin, unturned

#: name, (queries, entries) of each sequence, Hq, D, rotated, listed places, entries of a page
PARTS = (
    ("first", ((1, 1),), 4, 32, 8, 3, 4),
    ("borders", ((1, 3), (1, 4), (1, 5), (1, 30)), 4, 32, 8, 4, 4),
    ("verify-padded", ((3, 9), (2, 20), (0, 4)), 3, 26, 10, 6, 2),
    ("wide", ((1, 300), (2, 77)), 128, 512, 64, 70, 16),
)


def _starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def part_cases(seed: int) -> list[Case]:
    found = []
    for index, (name, sequences, hq, d, rotated, k, page) in enumerate(PARTS):
        for sink in (None, 0.5):
            g = generator(seed + index)
            table, pages = paged(g, [count for _, count in sequences], page)
            rows = sum(n for n, _ in sequences)
            padding = 2 if "padded" in name else 0
            values = torch.full((pages * page, d), torch.nan, dtype=torch.float64)
            listed, row = torch.full((rows + padding, k), -1, dtype=torch.int32), 0
            for s, (n, count) in enumerate(sequences):
                for _ in range(n):
                    mine = torch.randperm(count, generator=g)[: int(integers(g, k, 1)) + 1]
                    listed[row, : len(mine)] = mine.int()
                    values[locate(table[s], page, mine)] = normal(g, len(mine), d)
                    row += 1
            queries = _starts([n for n, _ in sequences])
            sinks = None if sink is None else (normal(g, hq) + sink).float()
            shape = {"rows": rows + padding, "seqs": len(sequences), "hq": hq, "d": d,
                     "rotated": rotated, "top_k": k, "page": page}  # fmt: skip
            entries = Entries(Form("kv", d, rotated), values, page)
            given = (normal(g, rows + padding, hq, d), entries, table, listed, sinks, queries)
            title = f"{name}-{'sink' if sinks is not None else 'bare'}"
            found.append(_part(title, given, d, shape, rows))
    return [*found, _nothing(seed)]


def _part(name: str, given: tuple[Any, ...], d: int, shape: dict[str, int], rows: int) -> Case:
    return Case(
        op="attn_part",
        name=name,
        args=given,
        kwargs={"scale": d**-0.5},
        shape=shape,
        rows=rows,
    )


def _nothing(seed: int) -> Case:
    """A row that lists nothing beside one that does."""
    g = generator(seed)
    table, pages = paged(g, [4], 4)
    values = torch.full((pages * 4, 32), torch.nan, dtype=torch.float64)
    values[locate(table[0], 4, torch.tensor([2]))] = normal(g, 1, 32)
    listed = torch.tensor([[-1, -1, -1], [2, -1, -1]], dtype=torch.int32)
    shape = {"rows": 2, "seqs": 1, "hq": 4, "d": 32, "rotated": 8, "top_k": 3, "page": 4}
    entries = Entries(Form("kv", 32, 8), values, 4)
    given = (normal(g, 2, 4, 32), entries, table, listed, None, _starts([2]))
    return _part("nothing", given, 32, shape, 2)


#: name, (queries, keys of this rank's part) of each sequence, Hq, Hkv, D, keys of a page
PAGED = (
    ("first", ((1, 1),), 2, 1, 16, 4),
    ("borders", ((1, 7), (1, 8), (1, 9)), 4, 2, 16, 8),
    ("verify-padded", ((3, 20), (2, 5)), 6, 2, 32, 2),
    ("group", ((1, 65), (2, 40)), 16, 1, 64, 16),
    ("nothing", ((1, 0), (2, 1), (1, 9)), 4, 2, 64, 4),
    ("ties-padded", ((1, 70), (0, 5), (1, 33)), 6, 1, 128, 8),
    ("wide", ((1, 150), (2, 70)), 6, 2, 96, 32),
)


def paged_cases(seed: int) -> list[Case]:
    found = []
    for index, (name, sequences, hq, hkv, d, page) in enumerate(PAGED):
        g = generator(seed + index)
        table, pages = paged(g, [count for _, count in sequences], page)
        rows, padding = sum(n for n, _ in sequences), 1 if "padded" in name else 0
        caches = [
            torch.full((pages * page, hkv, d), torch.nan, dtype=torch.float64) for _ in range(2)
        ]
        counts, row = torch.full((rows + padding,), 2, dtype=torch.int64), 0  # none sees padding's
        for s, (n, count) in enumerate(sequences):
            slots = locate(table[s], page, torch.arange(count))
            for cache in caches:
                cache[slots] = normal(g, count, hkv, d)
            if "ties" in name:  # every key as good as any other
                caches[0][slots] = normal(g, 1, hkv, d)
            counts[row : row + n] = (torch.arange(count - n, count) + 1).clamp_min(0)
            row += n
        found.append(
            Case(
                op="attn_paged_part",
                name=name,
                args=(
                    normal(g, rows + padding, hq, d),
                    *(cache.view(pages, page, hkv, d) for cache in caches),
                    table,
                    counts,
                    _starts([n for n, _ in sequences]),
                ),
                kwargs={"scale": d**-0.5},
                shape={
                    "rows": rows + padding, "seqs": len(sequences), "hq": hq, "hkv": hkv, "d": d,
                    "page": page, "context": 100, "shards": 2,
                },
                rows=rows + padding,  # which finds nothing
            )
        )  # fmt: skip
    return found


def weigh_cases(seed: int) -> list[Case]:
    found = []
    for index, (ranks, rows, heads, d, rotated, beside) in enumerate(
        ((2, 1, 2, 16, 8, True), (4, 5, 3, 26, 10, True), (2, 3, 4, 16, 0, False),
         (8, 2, 8, 512, 64, True))
    ):  # fmt: skip
        g = generator(seed + index)
        logs = normal(g, ranks, rows, ranks * heads + heads * beside, scale=3.0)
        mixed = normal(g, rows, ranks * heads, d)
        rank = index % ranks
        if beside:  # a rank without keys weighs nothing, also where it is this one
            logs[(rank + index) % ranks, 0, : ranks * heads] = EMPTY
        table = cos_sin(RopeSpec(rotated=rotated), 50) if rotated else None
        found.append(
            Case(
                op="attn_weigh",
                name=f"{ranks}x{rows}x{heads}x{d}",
                args=(
                    normal(g, rows, heads, d),
                    Single(mixed),
                    Single(logs),
                    Single(normal(g, rows, heads, d)) if beside else None,
                    table,
                    integers(g, 50, rows),
                ),
                kwargs={"rank": rank},
                shape={
                    "rows": rows, "hq": ranks * heads, "d": d, "rotated": rotated, "shards": ranks,
                },
            )
        )  # fmt: skip
    return found


#: name, (queries, entries of this rank's part) of each sequence, heads, D, top_k, entries of a page
CHOICES = (
    ("nothing", ((1, 0), (2, 1)), 4, 16, 3, 4),
    ("around-k", ((1, 2), (1, 3), (1, 4), (1, 9)), 4, 16, 3, 4),
    ("verify-padded", ((4, 20), (2, 7)), 1, 8, 5, 2),
    ("wide", ((2, 70), (1, 300)), 64, 128, 16, 16),
)


def index_cases(seed: int) -> list[Case]:
    found = []
    for index, (name, sequences, heads, d, top_k, page) in enumerate(CHOICES):
        g = generator(seed + index)
        table, pages = paged(g, [count for _, count in sequences], page)
        rows, padding = sum(n for n, _ in sequences), 2 if "padded" in name else 0
        keys = torch.full((pages * page, d), torch.nan, dtype=torch.float64)
        counts, row = torch.zeros(rows + padding, dtype=torch.int64), 0
        for s, (n, count) in enumerate(sequences):
            values = (integers(g, 7, count, d) - 3).double() * 0.5
            values[:, 0] = 1.75 * (2.0 * integers(g, 2, count) - 1)  # as in the indexer's cases
            values[1::3] = values[:1]  # ties
            keys[locate(table[s], page, torch.arange(count))] = values
            counts[row : row + n] = (torch.arange(count - n, count) + 1).clamp_min(0)
            row += n
        q = (integers(g, 7, rows + padding, heads, d) - 3).double() * 0.25
        weights = (integers(g, 9, rows + padding, heads) - 4).double() * 0.25
        found.append(
            Case(
                op="index_part",
                name=name,
                args=(
                    q,
                    weights,
                    Entries(Form("index", d), keys, page),
                    table,
                    counts,
                    _starts([n for n, _ in sequences]),
                ),
                kwargs={"top_k": top_k, "scale": 2.0**-5},
                shape={
                    "rows": rows + padding, "seqs": len(sequences), "heads": heads, "d": d,
                    "top_k": top_k, "page": page, "context": 400, "ratio": 4, "shards": 2,
                },
                rows=rows,
            )
        )  # fmt: skip
    return found


def merge_cases(seed: int) -> list[Case]:
    found = []
    for index, (ranks, rows, top_k, most) in enumerate(
        ((2, 4, 3, 5), (4, 6, 4, 2), (8, 3, 16, 60), (2, 2, 512, 900))
    ):
        g = generator(seed + index)
        numbers = torch.full((ranks, rows, top_k), -1, dtype=torch.int32)
        values = torch.zeros(ranks, rows, top_k, dtype=torch.float64)
        for r in range(ranks):
            for row in range(rows):
                count = min(top_k, int(integers(g, most + 1, 1)))
                mine = torch.randperm(max(most, count), generator=g)[:count].sort().values
                numbers[r, row, :count] = mine.int()
                values[r, row, :count] = integers(g, 4, count).double() - 1  # many ties
        found.append(
            Case(
                op="index_merge",
                name=f"{ranks}x{rows}x{top_k}",
                args=(numbers, Single(values)),
                kwargs={"rank": index % ranks},
                shape={"rows": rows, "top_k": top_k, "shards": ranks},
            )
        )
    return found


def part_recipe(
    q: Tensor,
    pages: EntryPages,
    page_table: Tensor,
    listed: Tensor,
    sinks: Tensor | None,
    query_start: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As attention whole: weights and mix rounded to the dtype; the logarithm stays wide."""
    mixed, logs = attn_part(q, pages, page_table, listed, sinks, query_start, scale=scale)
    starts = query_start.tolist()
    for s in range(len(starts) - 1):
        for row in range(starts[s], starts[s + 1]):
            numbers = listed[row][listed[row] >= 0].long()
            keys = gather(pages, locate(page_table[s], pages.entries, numbers)).to(mixed.dtype)
            weights = (wide(q[row]) @ keys.T * scale - logs[row].unsqueeze(1)).exp()
            mixed[row] = wide((wide(weights.to(q.dtype)) @ keys).to(q.dtype))
    return mixed, logs


def paged_recipe(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    counts: Tensor,
    query_start: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As attention whole: weights and mix rounded to the dtype; the logarithm stays wide."""
    mixed, logs = attn_paged_part(q, k_cache, v_cache, page_table, counts, query_start, scale=scale)
    starts, group = query_start.tolist(), q.shape[1] // k_cache.shape[2]
    for s in range(len(starts) - 1):
        for row in range(starts[s], starts[s + 1]):
            keys, values = (
                gather_rows(cache, page_table[s], 0, int(counts[row])).repeat_interleave(group, 1)
                for cache in (k_cache, v_cache)
            )
            logits = torch.einsum("hd,khd->hk", wide(q[row]), wide(keys)) * scale
            weights = wide((logits - logs[row].unsqueeze(1)).exp().to(q.dtype))
            mixed[row] = wide(torch.einsum("hk,khd->hd", weights, wide(values)).to(q.dtype))
    return mixed, logs


def _wrong_part(**more: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The sink left out, or the scale."""

    def wrong(
        q: Tensor, pages: Any, table: Tensor, listed: Tensor, sinks: Any, starts: Tensor,
        *, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        given = {"sinks": sinks, "scale": scale} | more
        return attn_part(q, pages, table, listed, given["sinks"], starts, scale=given["scale"])

    return wrong


def _wrong_paged(less: int = 0, **more: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The last `less` keys left out, or another scale."""

    def wrong(
        q: Tensor, keys: Tensor, values: Tensor, table: Tensor, counts: Tensor, starts: Tensor,
        *, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        seen, given = (counts - less).clamp_min(0), {"scale": scale} | more
        return attn_paged_part(q, keys, values, table, seen, starts, **given)

    return wrong


def _log_of_two(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The logarithm to the base 2."""
    mixed, logs = attn_paged_part(*args, **kwargs)
    return mixed, torch.where(logs > EMPTY, logs / math.log(2), logs)


def _not_weighed(
    q: Tensor, mixed: Tensor, logs: Tensor, near: Any, table: Any, positions: Tensor, *, rank: int
) -> Tensor:
    """Every rank's part counts alike."""
    even = torch.zeros_like(logs)
    return attn_weigh(q, mixed, even, near, table, positions, rank=rank)


def _not_turned(
    q: Tensor, mixed: Tensor, logs: Tensor, near: Any, table: Any, positions: Tensor, *, rank: int
) -> Tensor:
    turned = None if table is None else unturned(table)
    return attn_weigh(q, mixed, logs, near, turned, positions, rank=rank)


def _higher_on_ties(found: Tensor, values: Tensor, *, rank: int) -> Tensor:
    """Equal scores go to the rank before, not to the lower number."""
    ranks, tokens, top_k = found.shape
    out = torch.full((tokens, top_k), -1, dtype=torch.int32)
    for row in range(tokens):
        offered = [
            (-float(values[r, row, i]), r, int(n))
            for r in range(ranks)
            for i, n in enumerate(found[r, row].tolist())
            if n >= 0
        ]
        own = sorted(n for _, r, n in sorted(offered)[:top_k] if r == rank)
        out[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    return out


CASES = {
    "attn_part": part_cases,
    "attn_paged_part": paged_cases,
    "attn_weigh": weigh_cases,
    "index_part": index_cases,
    "index_merge": merge_cases,
}
REFERENCES = {
    "attn_part": attn_part,
    "attn_paged_part": attn_paged_part,
    "attn_weigh": attn_weigh,
    "index_part": index_part,
    "index_merge": index_merge,
}
RECIPES = {
    "attn_part": part_recipe,
    "attn_paged_part": paged_recipe,
    "attn_weigh": attn_weigh,
    "index_part": index_part,
    "index_merge": index_merge,
}
MISTAKES = {
    "attn_part": {
        "sink": (_wrong_part(sinks=None),),
        "scale": (_wrong_part(scale=1.0),),
    },
    "attn_paged_part": {
        "scale": (_wrong_paged(scale=1.0),),
        "last key": (_wrong_paged(less=1),),
        "base of the logarithm": (_log_of_two,),
    },
    "attn_weigh": {"weights of parts": (_not_weighed,), "inverse rope": (_not_turned,)},
    "index_merge": {"tie order": (_higher_on_ties,)},
}
