"""Views of compressed and latent caches, and the reference access of every entry form.

A page of a scaled form is a row of bytes: first the values of all its entries, then their scales
(DeepSeek-V4's 584-byte latents and its index keys are laid out so); plain forms keep a page as
[entries, width] in the model's type.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from metainfer.kv.book.form import EntryForm


@dataclass(frozen=True, slots=True)
class EntryPages:
    """One layer's pages of one group.

    `group` is the group's index in `SegmentInputs.groups`, `entries` the number of entries in a
    page. `data`: plain forms [P, entries, width] in `form.stored`, scaled ones [P, page bytes]
    uint8.
    """

    group: int
    data: Tensor
    form: EntryForm
    entries: int


@dataclass(frozen=True, slots=True)
class StateRows:
    """One layer's raw rows: `data` [B + 1, 2, L, C] float32 (float64 in float64).

    Line b belongs to slot b, line B to padding. `[:, 0]` holds values, `[:, 1]` gates with their
    bias; the row of position p stands at ``p % L``.
    """

    group: int
    data: Tensor
