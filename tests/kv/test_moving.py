"""Entries move as they are stored: bytes, scales and all, whatever the form."""

from __future__ import annotations

import pytest
import torch

from metainfer.kv.book.form import (
    EntryForm,
    index_fp4,
    index_fp8,
    index_plain,
    latent_fp8,
    latent_plain,
)
from metainfer.kv.store.entries import EntryPages, StateRows, gather, store
from metainfer.kv.store.moving import blank, lay, lift
from metainfer.kv.store.pools import PagedLayerCache

PAGES, ENTRIES = 5, 8
FROM, TO = torch.tensor([9, 0, 39, 17]), torch.tensor([23, 8, 1, 30])
FORMS = {
    "latent": latent_plain(24, 8, "float64"),
    "latent-fp8": latent_fp8(96, 32),
    "index": index_plain(16, "float32"),
    "index-fp8": index_fp8(16),
    "index-fp4": index_fp4(64),
}


def pages(form: EntryForm) -> EntryPages:
    """Pages of which every byte is known."""
    if form.stored == "uint8":
        shape, dtype = (PAGES, form.page_bytes(ENTRIES)), torch.uint8
        return EntryPages(0, torch.full(shape, 0x7E, dtype=dtype), form, ENTRIES)
    dtype = getattr(torch, form.stored)
    data = torch.full((PAGES, ENTRIES, form.width), float("nan"), dtype=dtype)
    return EntryPages(0, data, form, ENTRIES)


@pytest.mark.parametrize("name", FORMS)
def test_entries_read_alike_where_they_were_laid(name: str) -> None:
    form = FORMS[name]
    source, values = pages(form), torch.randn(4, form.width).double()
    store(source, FROM, values)
    target = pages(form)
    before = target.data.clone()
    lay(target, TO, lift(source, FROM))
    assert torch.equal(gather(target, TO), gather(source, FROM))
    assert torch.equal(lift(target, TO), lift(source, FROM))
    others = torch.tensor(sorted(set(range(PAGES * ENTRIES)) - set(TO.tolist())))
    untouched = EntryPages(0, before, form, ENTRIES)
    same = lift(target, others).view(torch.uint8) == lift(untouched, others).view(torch.uint8)
    assert same.all()
    copy = blank(source, 2)
    assert isinstance(copy, EntryPages) and copy.data.shape == (2, *source.data.shape[1:])


def test_keys_values_and_raw_rows_move_together() -> None:
    k, v = torch.randn(2, PAGES, ENTRIES, 2, 3)
    source, zero = PagedLayerCache(0, k, v), torch.zeros(2, PAGES, ENTRIES, 2, 3)
    target = PagedLayerCache(0, *zero)
    lay(target, TO, lift(source, FROM))
    for found, given in ((target.k, k), (target.v, v)):
        assert torch.equal(found.flatten(0, 1)[TO], given.flatten(0, 1)[FROM])
    assert int((target.k != 0).any(-1).any(-1).sum()) == 4
    rings = StateRows(0, torch.randn(4, 2, 10, 6))
    other = StateRows(0, torch.zeros(4, 2, 10, 6))
    lay(other, TO, lift(rings, FROM))
    for to, at in zip(TO.tolist(), FROM.tolist(), strict=True):
        assert torch.equal(other.data[to // 10, :, to % 10], rings.data[at // 10, :, at % 10])
    assert int((other.data != 0).any(-1).sum()) == 8
