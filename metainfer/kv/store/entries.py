"""Views of compressed and latent caches, and the reference access of every entry form.

A page of a scaled form is a row of bytes: first the values of all its entries, then their scales
(DeepSeek-V4's 584-byte latents and its index keys are laid out so), then padding; plain forms keep
a page as [entries, width] in the model's type. An entry's slot is ``page * entries + offset``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metainfer.kv.book.form import EntryForm
from metainfer.kv.store import entry_codecs


@dataclass(frozen=True, slots=True)
class EntryPages:
    """One layer's pages of one group.

    `group` is the group's index in `SegmentInputs.groups`, `entries` the number of entries in a
    page. `data`: plain forms [P, entries, width] in `form.stored`, scaled ones [P, page bytes]
    uint8. `parts`: ranks over which the entries of a page are dealt; `entries` are this one's.
    """

    group: int
    data: Tensor
    form: EntryForm
    entries: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class StateRows:
    """One layer's raw rows: `data` [B + 1, 2, L, C] float32 (float64 in float64).

    Line b belongs to slot b, line B to padding. `[:, 0]` holds values, `[:, 1]` gates with their
    bias; the row of position p stands at ``p % L``.
    """

    group: int
    data: Tensor


def store(pages: EntryPages, slots: Tensor, values: Tensor) -> None:
    """Write `values` [n, width] (any float type) at `slots` [n] int64; -1 skips a row.

    Plain forms round to their type, scaled ones as `entry_codecs.encode`. Slots that are not -1
    are different.
    """
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, values = slots[kept], values[kept]
    if pages.form.scale == "none":
        _rows(pages)[slots] = values.to(pages.data.dtype)
        return
    rows, scales = entry_codecs.encode(pages.form, values)
    page, offset = slots // pages.entries, slots % pages.entries
    value_rows, scale_rows = _regions(pages)
    value_rows[page, offset] = rows
    scale_rows[page, offset] = scales


def gather(pages: EntryPages, slots: Tensor) -> Tensor:
    """Entries at `slots` [n] int64, zeros at -1: [n, width] float32 (float64 when stored so)."""
    found = _read(pages, slots.clamp_min(0))
    if bool((slots < 0).any()):
        found.masked_fill_((slots < 0).unsqueeze(1), 0.0)
    return found


def put(pages: EntryPages, slots: Tensor, values: Tensor) -> None:
    """`store` without asking the host which rows are skipped, for a captured step."""
    at = (slots // pages.entries, slots % pages.entries)
    for rows, new in zip(_stored(pages), _as_stored(pages, values), strict=True):
        put_kept(rows, at, slots >= 0, new)


def put_kept(rows: Tensor, at: tuple[Tensor, Tensor], kept: Tensor, new: Tensor) -> None:
    """``rows[at] = new`` where `kept` [n], nothing elsewhere, without asking the host.

    Kept places differ. A row that is not kept writes what the first kept one writes, at the same
    place; where none is kept, all of them write one row back as it was.
    """
    if not len(kept):
        return
    first = kept.int().argmax(dim=0, keepdim=True)  # [1]; 0 where none is kept
    a, b = (torch.where(kept, part, part.index_select(0, first).clamp_min(0)) for part in at)
    held = rows[a.index_select(0, first), b.index_select(0, first)]

    def spread(mask: Tensor) -> Tensor:
        return mask.view(-1, *[1] * (new.dim() - 1))

    some = spread(kept.index_select(0, first))
    lone = torch.where(some, new.index_select(0, first), held)
    rows[a, b] = torch.where(spread(kept), new, lone)


def take(pages: EntryPages, slots: Tensor) -> Tensor:
    """`gather` without asking the host whether any slot is -1."""
    return _read(pages, slots.clamp_min(0)).masked_fill_((slots < 0).unsqueeze(1), 0.0)


def locate(table: Tensor, entries: int, numbers: Tensor) -> Tensor:
    """Slots of a sequence's entries: `table` [..., W] (page ids, -1 for none), `numbers` [..., n].

    -1 where the number is negative or its page is none; numbers lie below ``W * entries``.
    """
    page = table.long().gather(-1, numbers.clamp_min(0) // entries)
    return torch.where((numbers < 0) | (page < 0), -1, page * entries + numbers % entries)


def _read(pages: EntryPages, slots: Tensor) -> Tensor:
    if pages.form.scale == "none":
        found = _rows(pages).index_select(0, slots)
        return found if found.dtype == torch.float64 else found.float()
    page, offset = slots // pages.entries, slots % pages.entries
    value_rows, scale_rows = _regions(pages)
    return entry_codecs.decode(pages.form, value_rows[page, offset], scale_rows[page, offset])


def _stored(pages: EntryPages) -> tuple[Tensor, ...]:
    """What an entry's parts are written to, each [P, entries, n]."""
    return (pages.data,) if pages.form.scale == "none" else _regions(pages)


def _as_stored(pages: EntryPages, values: Tensor) -> tuple[Tensor, ...]:
    """`values` [n, width] as the rows of `_stored`."""
    if pages.form.scale == "none":
        return (values.to(pages.data.dtype),)
    return entry_codecs.encode(pages.form, values)


def _rows(pages: EntryPages) -> Tensor:
    """A plain form's entries as one matrix."""
    return pages.data.view(-1, pages.form.width)


def _regions(pages: EntryPages) -> tuple[Tensor, Tensor]:
    """A scaled form's value rows [P, entries, bytes] and scale rows, as views."""
    width = entry_codecs.value_bytes(pages.form)
    border, end = pages.entries * width, pages.entries * pages.form.bytes
    values = torch.unflatten(pages.data[:, :border], 1, (pages.entries, width))
    rest = (pages.entries, pages.form.bytes - width)
    return values, torch.unflatten(pages.data[:, border:end], 1, rest)
