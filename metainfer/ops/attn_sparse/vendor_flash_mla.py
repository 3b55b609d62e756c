"""`attn_sparse` over plain latents by FlashMLA, for chunks of a prompt.

The library reads one matrix of latents, and each query's rows of it. So what a chunk can read is
copied there: its own tokens, the window before each sequence's first, then every page of the entry
table. It knows no rope, so its result is turned back afterwards.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages
from metainfer.ops.common import owners
from metainfer.ops.foreign import library

KEYS = 128
"""The library takes numbers of keys that are multiples of this."""


def attn_sparse(
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
    """See `ref.attn_sparse`; q [T, 64 or 128, 512] bfloat16. Asks the host nothing.

    Raises:
        UserError: the library cannot be imported or has no `flash_mla_sparse_fwd`.
    """
    tokens, d = q.shape[0], q.shape[2]
    if tokens == 0 or context_lens.shape[0] == 0:
        return torch.zeros_like(q)
    sequence, real = owners(query_start, tokens)
    own = torch.where(real, positions, 0).int()  # [T]; rows fit 32 bits, and twice as many a second
    sequence = sequence.int()
    kept, picks = _window(local, local_table, own, sequence, query_start, window)
    if entries is not None and entry_table is not None and ratio:
        far, chosen = _entries(entries, entry_table, own, sequence, selected, ratio)
        picks = torch.cat((picks, torch.where(chosen >= 0, chosen + len(kept), -1)), dim=1)
        kept = torch.cat((kept, far))
    picks = torch.where(real.unsqueeze(1), picks, -1)
    short = -picks.shape[1] % KEYS
    if short:
        picks = torch.nn.functional.pad(picks, (0, short), value=-1)
    forward, options = _flash_mla(q.device)
    out: Tensor = forward(
        q.contiguous(), kept.unsqueeze(1), picks.unsqueeze(1), scale, d, sinks, **options
    )[0]
    _turn_back_(out, cos_sin.index_select(0, own))
    return out


def _turn_back_(out: Tensor, row: Tensor) -> None:
    """The last R channels of out [T, Hq, D] by the angles of row [T, R] float32, in place. A pair
    (2i, 2i + 1) is one complex number: three passes where real ones take ten."""
    rotated = row.shape[1]
    cos, sin = row.chunk(2, dim=1)
    tail = out[..., -rotated:].float().view(*out.shape[:2], rotated // 2, 2)
    torch.view_as_complex(tail).mul_(torch.complex(cos, -sin).unsqueeze(1))
    out[..., -rotated:] = tail.flatten(-2)


def _window(
    local: EntryPages,
    table: Tensor,
    own: Tensor,
    sequence: Tensor,
    query_start: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Latents [T + S (window - 1), D] of the tokens of this call, then of the window before each
    sequence's first; and of each query the rows of its window [T, window] int32, -1 for none."""
    tokens, before = len(own), window - 1
    start = query_start[:-1].clamp_max(tokens - 1)  # [S]; sequences without a query
    first = own.index_select(0, start)
    lead = torch.arange(before, dtype=torch.int32, device=own.device)
    earlier = first.unsqueeze(1) - before + lead  # [S, window - 1]; negative: none
    slots = torch.cat(
        (_slots(local, table, sequence, own), _slots(local, table, None, earlier).flatten())
    )
    kept = local.data.view(-1, local.form.width).index_select(0, slots)
    back = torch.arange(before, -1, -1, dtype=torch.int32, device=own.device)
    near = own.unsqueeze(1) - back  # [T, window]
    since = near - first.index_select(0, sequence).unsqueeze(1)
    inside = start.index_select(0, sequence).unsqueeze(1) + since
    outside = tokens + sequence.unsqueeze(1) * before + since + before
    picks = torch.where(since >= 0, inside, outside)
    return kept, torch.where(near >= 0, picks, -1)


def _slots(pages: EntryPages, table: Tensor, owner: Tensor | None, numbers: Tensor) -> Tensor:
    """Where tokens lie: `numbers` [T] of sequences `owner` [T], or [S, n] of each sequence. Those
    that are not there are read from any place, and nobody asks for them."""
    numbers = numbers.long().clamp_min(0)
    at = numbers // pages.entries
    page = table.gather(1, at) if owner is None else table[owner.long(), at]
    return page.long().clamp_min(0) * pages.entries + numbers % pages.entries


def _entries(
    entries: EntryPages,
    table: Tensor,
    own: Tensor,
    sequence: Tensor,
    selected: Tensor | None,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    """Latents of every page of every sequence [S W n, D], and each query's rows of them."""
    pages = entries.data.index_select(0, table.flatten().long().clamp_min(0))
    each = table.shape[1] * entries.entries
    chosen = selected
    if chosen is None:
        every = torch.arange(each, dtype=torch.int32, device=own.device)
        chosen = torch.where(every < ((own + 1) // ratio).unsqueeze(1), every, -1)
    rows = torch.where(chosen >= 0, chosen + (sequence * each).unsqueeze(1), -1)
    return pages.view(-1, entries.form.width), rows


@cache
def _flash_mla(device: torch.device) -> tuple[Any, dict[str, bool]]:
    """The library's function, and what else this card's kernels are called with: releases of late
    2026 keep those of Hopper apart."""
    forward = library("flash_mla", "flash_mla_sparse_fwd").flash_mla_sparse_fwd
    if "use_legacy" not in inspect.signature(forward).parameters:
        return forward, {}
    blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)
    return forward, {"use_legacy": not blackwell}
