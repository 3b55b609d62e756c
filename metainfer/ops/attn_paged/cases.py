"""Cases of `attn_paged`: page borders, windows, grouped heads, empty sequences, padded rows.

Pages that a sequence does not own, the rest of its last page, and entries that its window has left
behind hold NaN or -1: reading one shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.ops.attn_paged.ref import attn_paged, gather, visible
from metainfer.ops.case import Case, generator, normal

PREFILL = frozenset({Phase.CHUNK, Phase.MIXED})
DECODING = frozenset({Phase.MIXED, Phase.DECODE})
MIXED = frozenset({Phase.MIXED})
VERIFYING = frozenset({Phase.MIXED, Phase.VERIFY})


@dataclass(frozen=True, slots=True)
class Layout:
    """(queries, context) per sequence, and the sizes."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    hq: int = 4
    hkv: int = 2
    d: int = 64
    page: int = 16
    window: int = 0
    padding: int = 0
    phases: frozenset[Phase] = MIXED


LAYOUTS = (
    Layout("first-token", ((1, 1),), phases=DECODING),
    Layout("decode-borders", ((1, 15), (1, 16), (1, 17), (1, 33)), phases=DECODING),
    Layout("decode-gqa9", ((1, 40), (1, 7)), hq=9, hkv=3, phases=DECODING),
    Layout("decode-mha", ((1, 20),), hq=2, hkv=2, phases=DECODING),
    Layout("decode-one-kv", ((1, 50),), hq=8, hkv=1, phases=DECODING),
    Layout("decode-idle", ((0, 20), (1, 20), (0, 1)), phases=DECODING),
    Layout("decode-padded", ((1, 20), (1, 9)), padding=3, phases=DECODING),
    Layout("decode-window", ((1, 70), (1, 10), (1, 32)), window=32, phases=DECODING),
    Layout("decode-window-odd", ((1, 70), (1, 19)), window=19, phases=DECODING),
    Layout("decode-long", ((1, 700), (1, 3)), hq=2, hkv=1, phases=DECODING),
    Layout("decode-page32", ((1, 63), (1, 64), (1, 65)), page=32, phases=DECODING),
    Layout("decode-page64", ((1, 63), (1, 64), (1, 65)), page=64, phases=DECODING),
    Layout("decode-d96", ((1, 37),), d=96, phases=DECODING),
    Layout("decode-d128", ((1, 37), (1, 80)), hq=8, hkv=2, d=128, phases=DECODING),
    Layout("prompt", ((33, 33),), phases=PREFILL),
    Layout("prompts", ((5, 5), (16, 16), (1, 1)), phases=PREFILL),
    Layout("chunk", ((16, 50), (7, 100)), phases=PREFILL),
    Layout("chunk-gqa9-padded", ((19, 40),), hq=9, hkv=3, padding=5, phases=PREFILL),
    Layout("chunk-window", ((40, 90), (3, 3)), window=24, phases=PREFILL),
    Layout("chunk-d128", ((17, 33),), hq=4, hkv=1, d=128, page=32, phases=PREFILL),
    Layout("chunk-d96", ((9, 20),), d=96, phases=PREFILL),
    Layout("mixed", ((1, 30), (20, 20), (1, 5), (0, 9), (6, 38)), phases=MIXED),
    Layout("mixed-window", ((1, 60), (20, 50), (1, 5)), window=17, phases=MIXED),
    Layout("verify-one-draft", ((2, 9), (2, 2), (2, 33)), phases=VERIFYING),
    Layout("verify", ((3, 30), (4, 4), (3, 64)), phases=VERIFYING),
)


def build(layout: Layout, seed: int) -> Case:
    """Inputs of one layout, pages in random order."""
    g = generator(seed)
    page, hkv, d = layout.page, layout.hkv, layout.d
    contexts = [context for _, context in layout.sequences]
    queries = [count for count, _ in layout.sequences]
    width = max(-(-context // page) for context in contexts) + 1
    pool = sum(-(-context // page) for context in contexts) + 2
    order = torch.randperm(pool, generator=g).tolist()
    table = torch.full((len(contexts), width), -1, dtype=torch.int32)
    keys = torch.full((pool, page, hkv, d), float("nan"), dtype=torch.float64)
    values = keys.clone()
    for s, context in enumerate(contexts):
        first = max(0, context - queries[s] - layout.window + 1) if layout.window else 0
        for index in range(first // page, -(-context // page)):
            own = order.pop()
            table[s, index] = own
            low, high = max(first - index * page, 0), min(context - index * page, page)
            keys[own, low:high] = normal(g, high - low, hkv, d)
            values[own, low:high] = normal(g, high - low, hkv, d)
    start = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    rows = int(start[-1])
    q = normal(g, rows + layout.padding, layout.hq, d)
    return Case(
        op="attn_paged",
        name=layout.name,
        args=(q, keys, values, table, start, torch.tensor(contexts, dtype=torch.int32)),
        kwargs={"scale": d**-0.5, "window": layout.window},
        shape={
            "rows": rows + layout.padding,
            "seqs": len(contexts),
            "hq": layout.hq,
            "hkv": hkv,
            "d": d,
            "page": page,
            "context": max(contexts),
            "window": layout.window,
        },
        semantics=frozenset({"window"} if layout.window else ()),
        phases=layout.phases,
        rows=rows,
    )


def cases(seed: int) -> list[Case]:
    return [build(layout, seed + index) for index, layout in enumerate(LAYOUTS)]


def recipe(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """`eager_attention_forward`: products in the dtype, softmax in float32, weights rounded."""
    out = torch.zeros_like(q)
    starts, lens = query_start.tolist(), context_lens.tolist()
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    for s, context in enumerate(lens):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        first = max(0, context - (end - begin) - window + 1) if window else 0
        keys = gather(k_cache, page_table[s], first, context).transpose(0, 1)
        values = gather(v_cache, page_table[s], first, context).transpose(0, 1)
        group = q.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = q[begin:end].transpose(0, 1) @ keys.transpose(1, 2) * scale  # [Hq, Q, L]
        mask = visible(context, end - begin, first, window, q.device)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype)
        out[begin:end] = (weights @ values).transpose(0, 1)
    return out


def _window(change: int) -> Callable[..., Tensor]:
    """The window wider or narrower by `change` keys."""

    def wrong(*args: Tensor, scale: float, window: int = 0) -> Tensor:
        return attn_paged(*args, scale=scale, window=window + change if window else 0)

    return wrong


def _unbounded(*args: Tensor, scale: float, window: int = 0) -> Tensor:
    return attn_paged(*args, scale=scale)


def _unscaled(*args: Tensor, scale: float, window: int = 0) -> Tensor:
    return attn_paged(*args, scale=1.0, window=window)


def _other_groups(q: Tensor, keys: Tensor, *args: Tensor, **kwargs: Any) -> Tensor:
    """Head h reads cache head ``h % Hkv``."""
    order = torch.arange(q.shape[1]).view(-1, keys.shape[2]).T.flatten()
    out = attn_paged(q[:, order], keys, *args, **kwargs)
    return out[:, order.argsort()]


def _tail_dropped(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    contexts: Tensor,
    **kwargs: Any,
) -> Tensor:
    """The last page is read only where it is full. Sequences of one query."""
    page = keys.shape[1]
    short = torch.where(contexts > page, contexts // page * page, contexts)
    if bool((starts.diff() > 1).any()) or kwargs.get("window"):
        short = contexts
    return attn_paged(q, keys, values, table, starts, short, **kwargs)


def _page_stride(q: Tensor, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A page begins one token early."""
    moved = [cache.flatten(0, 1).roll(1, 0).view(cache.shape) for cache in (keys, values)]
    return attn_paged(q, *moved, *args, **kwargs)


CASES = {"attn_paged": cases}
REFERENCES = {"attn_paged": attn_paged}
RECIPES = {"attn_paged": recipe}
MISTAKES = {
    "attn_paged": {
        "window edge": (_window(1), _window(-1)),
        "window": (_unbounded,),
        "scale": (_unscaled,),
        "head groups": (_other_groups,),
        "last page's tail": (_tail_dropped,),
        "page stride": (_page_stride,),
    }
}
