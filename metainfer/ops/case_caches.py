"""Caches of cases as an implementation's layout holds them, and their contents as values again.

An argument of a case may be an `Entries` (becomes `EntryPages`), a `Form` (`EntryForm`), a `Rows`
(`StateRows`) or a `Single` (a tensor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from metainfer.kv.book.form import EntryForm, entry_form
from metainfer.kv.store.entries import EntryPages, StateRows, gather, store
from metainfer.ops.case import DTYPES

POISON = 0xFF
"""A byte that makes NaN of every element and of every scale."""

#: Largest step of a scaled form relative to the largest value of its group: 4 to 6, 416 to 448.
STEPS: Mapping[str, float] = MappingProxyType(
    {"latent-fp8@1": 1 / 14, "index-fp8@1": 1 / 14, "index-fp4@1": 1 / 3}
)


@dataclass(frozen=True, slots=True)
class Form:
    """The entry form (`kv.book.form`) of the layout that the implementation reads for `role`."""

    role: str
    width: int
    tail: int = 0


@dataclass(frozen=True, slots=True)
class Entries:
    """A cache: `values` [P * entries, width] float64 in pages of `entries`, stored in `form`.

    Rows of NaN were never written: their bytes are poison.
    """

    form: Form
    values: Tensor
    entries: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Raw rows of a compressor: `data` [B + 1, 2, L, C] float64, held in float32 (float64)."""

    data: Tensor


@dataclass(frozen=True, slots=True)
class Single:
    """Activations (float64) that models of half precision have in float32."""

    data: Tensor


def held(args: tuple[Any, ...], layouts: Mapping[str, str], dtype: str) -> tuple[Any, ...]:
    """A case's arguments rounded to `dtype`, its caches in `layouts` (role -> layout id)."""
    kind = DTYPES[dtype]
    single = torch.float64 if kind == torch.float64 else torch.float32

    def one(arg: Any) -> Any:
        match arg:
            case Form():
                return _form(arg, layouts, dtype)
            case Entries():
                return _pages(arg, _form(arg.form, layouts, dtype), kind)
            case Rows():
                return StateRows(group=0, data=arg.data.to(single))
            case Single():
                return Single(arg.data.to(single))
            case Tensor(dtype=torch.float64):
                return arg.to(kind)
            case _:
                return arg

    return tuple(one(arg) for arg in args)


def exactly(args: tuple[Any, ...], kind: torch.dtype) -> tuple[Any, ...]:
    """`args` of `held` with every activation, plain cache and raw row widened to float64."""

    def one(arg: Any) -> Any:
        match arg:
            case EntryForm():
                return _wide_form(arg)
            case EntryPages():
                data = arg.data if arg.form.scale != "none" else arg.data.double()
                return replace(arg, data=data, form=_wide_form(arg.form))
            case StateRows() | Single():
                return replace(arg, data=arg.data.double())
            case Tensor() if arg.dtype == kind:
                return arg.double()
            case _:
                return arg

    return tuple(one(arg) for arg in args)


def stored_floor(layout: str, count: int) -> tuple[float, float]:
    """Floor of errors for `count` values that were rounded to a scaled form: (mean, worst).

    Next to a border of the grid any other order of sums may land on the other side: as if one
    value, and one in 1,000 more, lay the largest step off.
    """
    step = STEPS[layout]
    flipped = 1 + count / 1000
    return float(step * (flipped / max(count, 1)) ** 0.5), step


def contents(pages: EntryPages) -> Tensor:
    """Every entry, [P * entries, width]: plain forms in their type, scaled ones in float32."""
    slots = torch.arange(pages.data.shape[0] * pages.entries, device=pages.data.device)
    found = gather(pages, slots)
    return found.to(pages.data.dtype) if pages.form.scale == "none" else found


def scaled_layout(args: tuple[Any, ...], output: Any) -> str:
    """The layout that rounded `output`, a result or a written argument; "" where none did."""
    if isinstance(output, EntryPages):
        form: EntryForm | None = output.form
    else:
        form = next((arg for arg in args if isinstance(arg, EntryForm)), None)
    return form.layout if form is not None and form.scale != "none" else ""


def _form(form: Form, layouts: Mapping[str, str], dtype: str) -> EntryForm:
    return entry_form(layouts[form.role], form.width, form.tail, dtype)


def _wide_form(form: EntryForm) -> EntryForm:
    if form.scale != "none":
        return form
    return entry_form(form.layout, form.width, form.tail, "float64")


def _pages(arg: Entries, form: EntryForm, kind: torch.dtype) -> EntryPages:
    count = arg.values.shape[0] // arg.entries
    if form.scale == "none":
        data = torch.full((count, arg.entries, form.width), torch.nan, dtype=kind)
    else:
        data = torch.full((count, form.page_bytes(arg.entries)), POISON, dtype=torch.uint8)
    pages = EntryPages(group=0, data=data, form=form, entries=arg.entries)
    written = ~arg.values.isnan().any(dim=1)
    store(pages, written.nonzero().squeeze(1), arg.values[written])
    return pages


def paged(g: torch.Generator, entries: list[int], per_page: int) -> tuple[Tensor, int]:
    """A page table [S, W] int32 for sequences of so many entries, and the number of pages.

    Pages lie in random order; page 0 belongs to nobody; places without a page are -1.
    """
    needed = [-(-count // per_page) for count in entries]
    total = sum(needed) + 2
    free = (torch.randperm(total - 1, generator=g) + 1).tolist()
    table = torch.full((len(entries), max([*needed, 1]) + 1), -1, dtype=torch.int32)
    for s, count in enumerate(needed):
        for w in range(count):
            table[s, w] = free.pop()
    return table, total
