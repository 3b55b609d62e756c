"""The memory ledger: what is held where, line by line, and how many cached tokens are left.

Bytes come from shapes and layouts, never from a measurement of this run; the executor's own count
is compared with them after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from metainfer.core.errors import RefusedError
from metainfer.core.plan import LedgerRow
from metainfer.core.verdict import Reason
from metainfer.kernels.impl import Layout
from metainfer.kv.book.capacity import CacheSizes, longest, steady_pages
from metainfer.kv.book.spec import GroupKind, GroupSpec
from metainfer.models.arch import Arch

RESERVE_PART = 0.08
"""Share of device memory left to the framework's context and fragmentation (seed)."""

SNAPSHOT_PART = 1 / 16
"""Share of the cache that snapshots of slot states may take (seed)."""

PLAIN_BYTES = {"float32": 4, "int64": 8}
"""Types of small parameters that do not follow the model's (`WeightSpec.dtype`)."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """How the cache was sized. `tokens`: most tokens that fit when spread over sequences."""

    sizes: CacheSizes
    tokens: int
    limited_by: str


def weight_rows(
    arch: Arch, layouts: Mapping[str, Layout], scheme_of: Callable[[str], str], dtype: str
) -> list[LedgerRow]:
    """One row per op site, a shared matrix once; the tensors of a matrix may differ in scheme.

    `layouts`: the bundle's layout of each role.
    """
    width = DTYPE_BYTES[dtype]
    held: set[tuple[object, ...]] = set()  # membership only
    by_site: dict[str, list[int]] = {}
    for spec in arch.packed_weights():
        layout = layouts[spec.role]
        key = layout.storage(spec.tensors, spec.site)
        if key in held:
            continue
        held.add(key)
        packed = spec.shape[0] * width if spec.bias else 0
        for name, (n, k) in zip(spec.tensors, spec.tensor_shapes(), strict=True):
            packed += layout.nbytes(scheme_of(name), n, k) if layout.nbytes else n * k * width
        by_site.setdefault(spec.site, []).append(packed)
    rows = [LedgerRow(item=site, kind="weights", bytes=sum(b)) for site, b in by_site.items()]
    plain = sum(spec.elements * PLAIN_BYTES.get(spec.dtype, width) for spec in arch.plain_weights())
    return [*rows, LedgerRow(item="norms and small parameters", kind="weights", bytes=plain)]


def size_cache(
    groups: Sequence[GroupSpec],
    budget_bytes: int,
    *,
    context: int,
    running: int,
    step_tokens: int,
) -> CacheBudget:
    """Pages per group within `budget_bytes`, or as many as `running` full sequences could use.

    Groups share the budget in proportion to what a full sequence needs of each.

    Raises:
        RefusedError: one sequence of `context` tokens does not fit; says what would.
    """
    wanted = [
        steady_pages(group, tokens=context, slots=running, step_tokens=step_tokens)
        for group in groups
    ]
    full = sum(pages * group.page_bytes for pages, group in zip(wanted, groups, strict=True))
    states = sum((running + 1) * group.slot_bytes for group in groups)
    places = _snapshot_places(groups, context * running, budget_bytes)
    states += sum(count * group.snapshot_bytes for count, group in zip(places, groups, strict=True))
    limited_by = "concurrency times context"
    pages = wanted
    if full + states > budget_bytes:
        limited_by = "memory"
        part = max(0.0, (budget_bytes - states) / full)
        pages = [int(count * part) for count in wanted]
    sizes = CacheSizes(
        groups=tuple(groups), pages=tuple(pages), snapshots=tuple(places), slots=running
    )
    reach = longest(sizes)
    if reach < context:
        one = states + sum(
            steady_pages(group, tokens=context, slots=1, step_tokens=step_tokens) * group.page_bytes
            for group in groups
        )
        enough = f"--kv-memory to {-(-one >> 20)}MiB."
        raise RefusedError(
            f"a context of {context:,} tokens needs {one:,} B of cache, "
            f"{budget_bytes:,} B are left for it.",
            f"Lower --context to {reach:,}, or raise {enough}" if reach > 0 else f"Raise {enough}",
            reasons=(Reason("memory", f"{one:,} B needed, {budget_bytes:,} B available"),),
            code="does_not_fit",
        )
    return CacheBudget(sizes, _spread_tokens(sizes), limited_by)


def _snapshot_places(groups: Sequence[GroupSpec], tokens: int, budget_bytes: int) -> list[int]:
    """Places for snapshots: one for each position of `tokens` cached tokens at which a hit may
    start, within `SNAPSHOT_PART` of the cache. Groups that need none have none."""
    each = sum(group.snapshot_bytes for group in groups if group.snapshot_tokens)
    most = int(budget_bytes * SNAPSHOT_PART) // each if each else 0
    return [
        min(most, tokens // group.snapshot_tokens) if group.snapshot_tokens else 0
        for group in groups
    ]


def kv_rows(sizes: CacheSizes, tokens: int) -> list[LedgerRow]:
    """One row per group: allocated, and what `tokens` cached tokens (a window of each slot, the
    rows of each slot) need of it."""
    rows = []
    for group in sizes.groups:
        logical = sizes.slots * group.slot_bytes
        if group.kind is not GroupKind.STATE:
            held = tokens if group.kind is GroupKind.PAGED else sizes.slots * group.window
            logical = held // group.tokens_per_entry * group.form.bytes * len(group.layers)
        allocated = sizes.group_bytes(group)
        rows.append(LedgerRow(item=group.name, kind="kv", bytes=allocated, logical_bytes=logical))
    return rows


def total(rows: Sequence[LedgerRow], kinds: Mapping[str, None] | None = None) -> int:
    """Bytes of all rows, or of those whose kind is listed."""
    return sum(row.bytes for row in rows if kinds is None or row.kind in kinds)


def _spread_tokens(sizes: CacheSizes) -> int:
    """Tokens that paged groups hold in all; with windows only, what the windows hold."""
    paged = [
        (sizes.pages[group.index] - 1) * group.page_tokens
        for group in sizes.groups
        if group.kind is GroupKind.PAGED
    ]
    if paged:
        return min(paged)
    windows = [
        (sizes.pages[group.index] - 1) * group.page_tokens
        for group in sizes.groups
        if group.kind is GroupKind.WINDOW
    ]
    return min(windows, default=0)
