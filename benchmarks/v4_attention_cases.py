"""Sparse attention of DeepSeek-V4 at its shapes, by tiles, sets of chosen entries and caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from v4_cases import BF16, Work, _text

from metainfer.kv.book.form import EntryForm, plain
from metainfer.kv.store.entries import EntryPages, gather, locate, store
from metainfer.ops.attn_sparse.tiles import (
    FEW,
    FEW_SCALED,
    HOPPER,
    SLICED,
    SMALL_SCALED,
    WGMMA_SCALED,
    HopperTile,
    Tile,
)
from metainfer.ops.attn_sparse.triton_calls import attn_sparse, wgmma, wgmma_scaled
from metainfer.ops.common import rotate_tail

L2_BYTES = 128 << 20
"""Read between calls that are to find nothing in the second-level cache: twice an H200's."""

LATENT = plain("latent@1", 512, "bfloat16", tail=64)
LATENT_FP8 = EntryForm(
    layout="latent-fp8@1", width=512, stored="uint8", bytes=584, tail=64, scale="pow2", group=64,
    page_multiple=576,
)  # fmt: skip


def _pages(form: EntryForm, pages: int, entries: int) -> EntryPages:
    if form.scale == "none":
        return EntryPages(
            0, torch.randn(pages, entries, 512, device="cuda").to(BF16), form, entries
        )
    data = torch.zeros(pages, form.page_bytes(entries), dtype=torch.uint8, device="cuda")
    held = EntryPages(0, data, form, entries)
    for first in range(0, pages * entries, 1 << 16):
        slots = torch.arange(first, min(first + (1 << 16), pages * entries), device="cuda")
        store(held, slots, torch.randn(len(slots), 512, device="cuda"))
    return held


def sparse(sweep: bool) -> Iterator[Work]:
    for form in (LATENT, LATENT_FP8):
        for queries, sequences, context, top in (
            (1, 1, 1024, 512), (1, 8, 1024, 512), (1, 32, 1024, 512), (1, 1, 131072, 512),
            (1, 8, 131072, 512), (1, 8, 131072, 0), (2048, 1, 40960, 512), (8192, 1, 40960, 512),
        ):  # fmt: skip
            yield from attention(form, queries, sequences, context, top, sweep)


def sets(sweep: bool) -> Iterator[Work]:
    """Chosen entries scattered and the nearest ones, with and without what the caches hold; rows
    behind a flush are to be read less the flush by itself."""
    room = torch.zeros(L2_BYTES // 4, device="cuda")

    def flush(i: int) -> Tensor:
        return room.add_(1.0)[:1]

    one = (torch.ones(1, dtype=torch.float64, device="cuda"), torch.ones(1, device="cuda"))
    yield Work("flush", "alone", lambda i: flush(i) * 0 + 1, lambda: one, 2.0 * L2_BYTES, 0.0)
    for queries, sequences in ((1, 1), (1, 32), (1, 128), (2048, 1)):
        for name, picks in (("scattered", _picked), ("local", _local)):
            for work in attention(LATENT, queries, sequences, 40960, 512, sweep, picks):
                if work.variant != "as shapes choose":
                    continue
                yield replace(work, variant=f"{name}, warm", copies=1)

                def cold(i: int, call: Callable[[int], Any] = work.call) -> Any:
                    flush(i)
                    return call(i)

                yield replace(work, variant=f"{name}, behind a flush", call=cold, copies=1)


def _local(positions: Tensor, ratio: int, count: int, top: int) -> Tensor:
    """The last entries that each query sees, rising, then -1: [T, top] int32."""
    seen = ((positions + 1) // ratio).clamp(max=count)[:, None]
    place = (seen - top).clamp_min(0) + torch.arange(top, device="cuda")
    return place.masked_fill_(place >= seen, -1).int()


def _picked(positions: Tensor, ratio: int, count: int, top: int) -> Tensor:
    """Random entries of those each query sees, rising, then -1: [T, top] int32."""
    picked = torch.full((len(positions), top), -1, dtype=torch.int32, device="cuda")
    for first in range(0, len(positions), 1024):
        part = slice(first, first + 1024)
        seen = ((positions[part] + 1) // ratio)[:, None]
        chance = torch.rand(len(seen), count, device="cuda")
        chance.masked_fill_(torch.arange(count, device="cuda") >= seen, -1.0)
        best = chance.topk(min(top, count), dim=1)
        kept = torch.where(best.values < 0, 1 << 30, best.indices).sort(1).values
        picked[part, : kept.shape[1]] = torch.where(kept == 1 << 30, -1, kept).int()
    return picked


def _attention_tiles(form: EntryForm, rows: int) -> list[Tile | HopperTile]:
    plain = form.scale == "none"
    if rows <= 32:
        return [FEW, HOPPER] if plain else [FEW_SCALED, WGMMA_SCALED]
    return [HopperTile(resident=False)] if plain else []


def attention(
    form: EntryForm,
    queries: int,
    sequences: int,
    context: int,
    top: int,
    sweep: bool,
    picks: Callable[[Tensor, int, int, int], Tensor] | None = None,
    foreign: Callable[..., Tensor] | None = None,
) -> Iterator[Work]:
    rows, ratio = queries * sequences, 4 if top else 128
    count = context // ratio
    width = -(-count // 64)
    entries = _pages(form, sequences * width + 1, 64)
    entry_table = torch.randperm(sequences * width, device="cuda").view(sequences, -1).int() + 1
    local_pages = -(-(queries + 128) // 64) + 1
    local = _pages(form, sequences * local_pages + 1, 64)
    local_table = torch.full((sequences, context // 64), -1, dtype=torch.int32, device="cuda")
    used = min(local_pages, context // 64)
    order = torch.randperm(sequences * local_pages, device="cuda").view(sequences, -1).int() + 1
    local_table[:, -used:] = order[:, :used]
    positions = torch.arange(context - queries, context, device="cuda").repeat(sequences)
    picked = (picks or _picked)(positions, ratio, count, top) if top else None
    q = torch.randn(rows, 64, 512, device="cuda").to(BF16)
    sinks = torch.randn(64, device="cuda")
    angles = torch.rand(context, 32, device="cuda") * 6.3
    table = torch.cat((angles.cos(), angles.sin()), 1)
    start = torch.arange(0, rows + 1, queries, dtype=torch.int32, device="cuda")
    lens = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    scale = 512**-0.5

    def truth() -> tuple[Tensor, Tensor]:
        n = min(rows, 48)
        exact, stepped = [], []
        for t in range(n):
            s, p = t // queries, int(positions[t])
            near = torch.arange(max(0, p - 127), p + 1, device="cuda")
            far = torch.arange((p + 1) // ratio, device="cuda")
            if picked is not None:
                far = picked[t][picked[t] >= 0].long()
            keys = torch.cat((gather(local, locate(local_table[s], 64, near)),
                              gather(entries, locate(entry_table[s], 64, far))))  # fmt: skip
            for kind, into in ((torch.float64, exact), (torch.float32, stepped)):
                k = keys.to(BF16).to(kind)
                logits = q[t].to(kind) @ k.T * scale
                full = torch.cat((logits, sinks.to(kind)[:, None]), 1).softmax(1)[:, :-1]
                if kind == torch.float32:
                    full = full.to(BF16).float()
                into.append(rotate_tail(full @ k, table[p], inverse=True))
        return torch.stack(exact), torch.stack(stepped).to(BF16)

    keys = min(context, 128) + (min(top, count) if top else count)
    small = SLICED if form.scale == "none" else SMALL_SCALED
    tiles = _attention_tiles(form, rows) if sweep else []
    element = 1024 if form.scale == "none" else 584
    args = (q, local, local_table, entries, entry_table, picked, sinks, table, positions, start)
    options: dict[str, Any] = {"scale": scale, "window": 128, "ratio": ratio}
    forms: dict[str, Callable[[int], Tensor]] = {
        _text(tile, ""): lambda i, t=tile: attn_sparse(*args, lens, **options, tile=t, hopper=True)
        for tile in tiles
    }
    if rows <= 2048 and (form.scale == "none" or rows <= 32):
        forms["smaller cards"] = lambda i: attn_sparse(*args, lens, **options, tile=small)
    if foreign is not None:
        forms["another library's"] = lambda i: foreign(*args, lens, **options)
    chosen = wgmma if form.scale == "none" else wgmma_scaled
    forms["as shapes choose"] = lambda i: chosen(*args, lens, **options)
    for text, call in forms.items():
        kind = "prefill" if queries > 1 else "decode"
        yield Work(
            f"sparse {kind} {form.layout} q={rows} L={context} k={top}",
            text,
            call,
            cache(truth),
            bytes=min(rows * keys, sequences * (count + queries + 128)) * element
            + rows * 64 * 512 * 4,
            flops=4.0 * rows * 64 * 512 * keys,
            rate="bf16_flops",
            copies=4 if queries == 1 else 1,
        )


SECTIONS: dict[str, Callable[[bool], Iterator[Work]]] = {"sparse": sparse, "sets": sets}
