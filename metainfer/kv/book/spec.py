"""How a layer describes its cache, and how layers form groups. Descriptions only, no tensors.

Three kinds of group, told apart by what *rewind* means:

* `PAGED`: append-only pages, kept for the whole sequence. Rewind = lower the length.
* `WINDOW`: pages too, but only the last `window` tokens are needed; older pages are given back
  (and may stay as prefix-cache content until reused). Rewind = lower the length, within the window.
* `STATE`: a fixed block per slot (compressor rows, recurrent state). Rewind after rejected drafts
  is declared: `CURSOR` (ring addressed by position, goes back by arithmetic over at most
  `ring_tokens` tokens) or `SNAPSHOT` (copied aside before a verify run, copied back after it).

Resuming after a prefix hit is another question than rewinding: a state is either *clean* (holds
nothing) at multiples of `clean_tokens`, such as a compressor whose windows close there, or it is
saved at `snapshot_tokens` boundaries. A hit starts where *every* group can start: a multiple of
each page (in tokens) and of each clean span, with each window's last pages present and a snapshot
of each state that is not clean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from metainfer.core.errors import InternalError
from metainfer.kv.book.form import EntryForm


class GroupKind(StrEnum):
    PAGED = "paged"
    WINDOW = "window"
    STATE = "state"


class Rewind(StrEnum):
    """How a state group goes back after rejected drafts or resumes after a hit."""

    CURSOR = "cursor"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """One layer's cache. `form` says what an entry (of a state: a row) is.

    `tokens_per_entry`: 1, or the compression ratio. `page_tokens`: a page size of its own, 0 for
    the common one. A `STATE` has `rows` rows per slot; `snapshot_rows` is how many of them, from
    the end, a hit needs (0: all). A layer that borrows (`kv_source`, `index_source`) names the
    layer whose cache it reads and owns none itself. `deals`: entries of a paged cache may be dealt
    over ranks that would all hold them.
    """

    layer: int
    name: str  # "kv", "index", "rows" ...
    kind: GroupKind
    form: EntryForm
    tokens_per_entry: int = 1
    window: int = 0
    page_tokens: int = 0
    rows: int = 0
    snapshot_rows: int = 0
    rewind: Rewind = Rewind.CURSOR
    ring_tokens: int = 0
    clean_tokens: int = 0
    deals: bool = True
    kv_source: int | None = None
    index_source: int | None = None

    @property
    def borrows(self) -> bool:
        return self.kv_source is not None or self.index_source is not None

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot's rows in this layer."""
        return self.rows * self.form.bytes

    def group_key(self) -> tuple[object, ...]:
        """Layers with equal keys share a group: same pages, same life time."""
        own = ("layer", "kv_source", "index_source")
        return tuple(getattr(self, item.name) for item in fields(self) if item.name not in own)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Layers whose caches are paged together. A group's page id is valid in all its layers.

    `page_tokens`: tokens a page covers (the block that the book hands out). `kernel_page_entries`:
    entries per *physical* page as the kernel walks it; a logical page is a whole number of them.
    `snapshot_tokens`: for a state without `clean_tokens`, the distance between snapshots. `cache`:
    the name by which a layer's view is found. `deals`: see `CacheSpec`. `shards`: ranks over which
    every page's entries are dealt in turn; entry e of a page lies with number ``e % shards``, and
    `part` is this rank's.
    """

    index: int
    name: str
    cache: str
    kind: GroupKind
    form: EntryForm
    layers: tuple[int, ...]
    page_tokens: int = 0
    kernel_page_entries: int = 0
    tokens_per_entry: int = 1
    window: int = 0
    rows: int = 0
    snapshot_rows: int = 0
    rewind: Rewind = Rewind.CURSOR
    ring_tokens: int = 0
    snapshot_tokens: int = 0
    clean_tokens: int = 0
    deals: bool = True
    shards: int = 1
    part: int = 0

    @property
    def page_entries(self) -> int:
        return self.page_tokens // self.tokens_per_entry

    @property
    def rank_entries(self) -> int:
        """Entries of a page that one rank holds; the most of any where they do not divide."""
        return -(-self.page_entries // self.shards)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the group, on each of `shards` ranks."""
        return self.form.page_bytes(self.rank_entries) * len(self.layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's state over all layers of the group."""
        return self.rows * self.form.bytes * len(self.layers)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot over all layers of the group."""
        return (self.snapshot_rows or self.rows) * self.form.bytes * len(self.layers)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens occupy when none has been given back."""
        return -(-tokens // self.page_tokens) if self.page_tokens else 0

    def live_pages(self, tokens: int) -> int:
        """Most pages a sequence of `tokens` tokens must hold at once, between steps."""
        if self.kind is GroupKind.WINDOW:
            return min(self.pages_for(tokens), -(-self.window // self.page_tokens) + 1)
        return self.pages_for(tokens)


def form_groups(
    specs: tuple[CacheSpec, ...], *, page_tokens: int, snapshot_tokens: int = 0
) -> tuple[GroupSpec, ...]:
    """Group layers by `CacheSpec.group_key`, in order of first appearance.

    `page_tokens` is the common logical page; a compressed group needs it to be a multiple of its
    ratio so that a page holds whole entries.

    Raises:
        InternalError: a page is not a multiple of its group's `tokens_per_entry`, or snapshots of
            part of a ring would not stand at one place.
    """
    by_key: dict[tuple[object, ...], list[CacheSpec]] = {}
    for spec in specs:
        if not spec.borrows:
            by_key.setdefault(spec.group_key(), []).append(spec)
    return tuple(
        _group(index, members, page_tokens, snapshot_tokens or page_tokens)
        for index, members in enumerate(by_key.values())
    )


def _group(
    index: int, members: list[CacheSpec], page_tokens: int, snapshot_tokens: int
) -> GroupSpec:
    first = members[0]
    paged = first.kind is not GroupKind.STATE
    page = (first.page_tokens or page_tokens) if paged else 0
    if page % first.tokens_per_entry:
        raise InternalError(
            f"page of {page} tokens holds no whole number of {first.name} entries "
            f"(one per {first.tokens_per_entry} tokens)"
        )
    snapshots = 0 if paged or first.clean_tokens else snapshot_tokens
    if snapshots and first.snapshot_rows and snapshots % first.rows:
        raise InternalError(
            f"snapshots every {snapshots} tokens cut a ring of {first.rows} {first.name}"
        )
    return GroupSpec(
        index=index,
        name=_group_name(first),
        cache=first.name,
        kind=first.kind,
        form=first.form,
        layers=tuple(spec.layer for spec in members),
        page_tokens=page,
        kernel_page_entries=page // first.tokens_per_entry,
        tokens_per_entry=first.tokens_per_entry,
        window=first.window,
        rows=first.rows,
        snapshot_rows=first.snapshot_rows,
        rewind=first.rewind,
        ring_tokens=first.ring_tokens,
        snapshot_tokens=snapshots,
        clean_tokens=first.clean_tokens,
        deals=first.deals,
    )


def hit_grid(groups: tuple[GroupSpec, ...]) -> int:
    """Tokens between positions at which every group can resume (least common multiple)."""
    steps = [
        group.page_tokens or group.snapshot_tokens or group.clean_tokens or 1 for group in groups
    ]
    return math.lcm(*steps) if steps else 1


def _group_name(spec: CacheSpec) -> str:
    if spec.kind is GroupKind.WINDOW:
        return f"{spec.name}-window{spec.window}"
    if spec.kind is GroupKind.STATE and spec.clean_tokens:
        return f"{spec.name}-by{spec.clean_tokens}"
    if spec.tokens_per_entry > 1:
        return f"{spec.name}-1of{spec.tokens_per_entry}"
    return spec.name
