"""Small paged caches for tests: poison everywhere, pages in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.kv.book.form import EntryForm, index_plain, latent_plain
from metainfer.kv.store.entries import EntryPages, gather, locate, store

NAN = float("nan")


@dataclass
class Candidate:
    """The implementation under test; a module's fixture puts each in turn."""

    op: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def double_latent(width: int, tail: int = 0) -> EntryForm:
    return latent_plain(width, tail, "float64")


def double_key(width: int) -> EntryForm:
    return index_plain(width, "float64")


def poisoned(form: EntryForm, pages: int, entries: int) -> EntryPages:
    """Pages whose every entry reads as NaN."""
    if form.scale == "none":
        kind = getattr(torch, form.stored)
        data = torch.full((pages, entries, form.width), NAN, dtype=kind)
    else:
        data = torch.full((pages, form.page_bytes(entries)), 0xFF, dtype=torch.uint8)
    return EntryPages(group=0, data=data, form=form, entries=entries)


def table(counts: list[int], entries: int, seed: int = 0) -> tuple[Tensor, int]:
    """A page table [S, W] for sequences of so many entries, and the number of pages; page 0 is
    nobody's."""
    needed = [-(-count // entries) for count in counts]
    g = torch.Generator().manual_seed(seed)
    free = (torch.randperm(sum(needed), generator=g) + 1).tolist()
    found = torch.full((len(counts), max([*needed, 1])), -1, dtype=torch.int32)
    for s, count in enumerate(needed):
        for w in range(count):
            found[s, w] = free.pop()
    return found, sum(needed) + 1


def filled(
    values: list[Tensor], entries: int, form: EntryForm, seed: int = 0
) -> tuple[EntryPages, Tensor]:
    """Each sequence's values [n, width] in pages; rows with NaN stay poison."""
    where, count = table([len(v) for v in values], entries, seed)
    pages = poisoned(form, count, entries)
    for s, rows in enumerate(values):
        kept = (~rows.isnan().any(dim=1)).nonzero().squeeze(1)
        store(pages, locate(where[s], entries, kept), rows[kept])
    return pages, where


def line(pages: EntryPages, row: Tensor, count: int) -> Tensor:
    """The first `count` entries of a sequence."""
    return gather(pages, locate(row, pages.entries, torch.arange(count)))


def closing(row: Tensor, entries: int, first: int, last: int, ratio: int) -> Tensor:
    """`slots` of the tokens `first` .. `last` - 1: the place of the entry each closes, or -1."""
    t = torch.arange(first, last)
    return locate(row, entries, torch.where((t + 1) % ratio == 0, t // ratio, -1))


def where(queries: list[int], contexts: list[int]) -> tuple[Tensor, Tensor]:
    """`query_start` and `context_lens`."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return starts, torch.tensor(contexts, dtype=torch.int32)
