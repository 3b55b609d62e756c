"""Cache entries as they are stored, between caches of equal form: on one rank or across ranks.

A slot is ``page * entries + offset``; of raw rows, ``line * rows + place in the ring``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.kv.store import entry_codecs
from metainfer.kv.store.entries import EntryPages, StateRows
from metainfer.kv.store.pools import LayerView, PagedLayerCache


def lift(view: LayerView, slots: Tensor) -> Tensor:
    """What stands at `slots` [n] int64, bytes unchanged: K and V [n, 2, Hkv, D], entries
    [n, width], scaled entries [n, bytes] uint8, raw rows [n, 2, C]."""
    if isinstance(view, PagedLayerCache):
        return torch.stack([part.flatten(0, 1)[slots] for part in (view.k, view.v)], dim=1)
    if isinstance(view, StateRows):
        rows = view.data.shape[2]
        return view.data[slots // rows, :, slots % rows]
    page, offset = slots // view.entries, slots % view.entries
    return torch.cat([part[page, offset] for part in _regions(view)], dim=1)


def lay(view: LayerView, slots: Tensor, stored: Tensor) -> None:
    """`lift` undone: `stored` [n, ...] at `slots` [n], which are different."""
    if isinstance(view, PagedLayerCache):
        for index, part in enumerate((view.k, view.v)):
            part.view(-1, *part.shape[2:])[slots] = stored[:, index]
        return
    if isinstance(view, StateRows):
        rows = view.data.shape[2]
        view.data[slots // rows, :, slots % rows] = stored
        return
    page, offset = slots // view.entries, slots % view.entries
    regions = _regions(view)
    widths = [region.shape[2] for region in regions]
    for region, part in zip(regions, torch.split(stored, widths, dim=1), strict=True):
        region[page, offset] = part


def blank(view: LayerView, count: int) -> LayerView:
    """A cache of the same form with `count` pages (lines of raw rows), holding anything; of what is
    dealt, whole pages."""
    if isinstance(view, PagedLayerCache):
        shape = (count, view.k.shape[1] * view.parts, *view.k.shape[2:])
        return PagedLayerCache(view.group, view.k.new_empty(shape), view.v.new_empty(shape))
    if isinstance(view, StateRows):
        return StateRows(view.group, view.data.new_empty(count, *view.data.shape[1:]))
    entries, form = view.entries * view.parts, view.form
    page = (form.page_bytes(entries),) if form.stored == "uint8" else (entries, form.width)
    return EntryPages(view.group, view.data.new_empty(count, *page), form, entries)


def _regions(pages: EntryPages) -> tuple[Tensor, ...]:
    """What holds an entry's parts, each [P, entries, n], as views."""
    form, entries = pages.form, pages.entries
    if form.scale == "none":
        return (pages.data,)
    width = entry_codecs.value_bytes(form)
    border, end = entries * width, entries * form.bytes
    values = torch.unflatten(pages.data[:, :border], 1, (entries, width))
    scales = torch.unflatten(pages.data[:, border:end], 1, (entries, form.bytes - width))
    return values, scales
