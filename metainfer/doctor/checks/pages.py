"""The page contract: what a page of each cache group is, and kernels that it costs (B-08)."""

from __future__ import annotations

from metainfer.doctor.finding import Finding, information, slows
from metainfer.doctor.inputs import Inputs
from metainfer.kernels.impl import Quality
from metainfer.kv.book.spec import GroupKind, GroupSpec, hit_grid

EXTENT = "page"
#: A prefix shorter than this is not worth caching; a coarser grid loses ordinary system prompts.
COARSE_TOKENS = 2048
REMEDY = "Choose --page-tokens so that every kernel's sizes divide it."


def check(inputs: Inputs) -> list[Finding]:
    if inputs.model is None:
        return []
    return [*_refused(inputs), *_groups(inputs.model.groups)]


def describe(group: GroupSpec) -> str:
    """One row of the table: logical and physical page, ratio, bytes."""
    if group.kind is GroupKind.STATE:
        return f"{group.name}: {group.rows} rows a sequence, {group.slot_bytes:,} B"
    ratio = (
        "" if group.tokens_per_entry == 1 else f", one entry per {group.tokens_per_entry} tokens"
    )
    return (
        f"{group.name}: {group.page_tokens} tokens a page, {group.page_entries} entries, kernels "
        f"walk {group.kernel_page_entries} at a time{ratio}, {group.page_bytes:,} B"
    )


def _groups(groups: tuple[GroupSpec, ...]) -> list[Finding]:
    if not groups:
        return []
    grid = hit_grid(groups)
    rows = "; ".join(describe(group) for group in groups)
    what = f"{len(groups)} cache groups; a cached prefix is taken up at multiples of {grid} tokens."
    if grid > COARSE_TOKENS:
        return [slows("pages.grid", "cache groups", what, REMEDY, rows, "other kernels may refuse")]
    return [information("pages.groups", "cache groups", what, evidence=rows)]


def _refused(inputs: Inputs) -> list[Finding]:
    """Kernels that nothing but the page refuses, at sites that now run on a lesser path."""
    assert inputs.model is not None
    lost: dict[str, tuple[str, str]] = {}
    for choice in inputs.model.selection.bundle.choices:
        if choice.quality is Quality.NATIVE:
            continue
        for loser in choice.rejected:
            reasons = loser.reasons
            if reasons and all(reason.data.get("extent") == EXTENT for reason in reasons):
                message = "; ".join(reason.message for reason in reasons)
                lost.setdefault(loser.impl, (choice.request.site, message))
    found = []
    for impl, (site, message) in sorted(lost.items()):
        what = f"the page alone refuses {impl}: {message}."
        risk = "a larger page wastes memory at the end of each sequence"
        found.append(slows("pages.refused", site, what, REMEDY, f"{impl}: {message}", risk))
    return found
