"""How a layout cuts the weights of any family, and what forbids it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Verdict, require
from metainfer.models.arch import Cut, WeightSpec

ENDS = ("embed", "linear.lm_head")


def cut_of(spec: WeightSpec, layout: LayoutPlan, tensor: Mapping[str, Cut]) -> tuple[Cut, int]:
    """How a weight is cut and into how many parts; `tensor`: by tensor ranks, by site. Of a pair a
    rank holds every part but of experts and vocabulary: chunks need them all."""
    if spec.role == "experts" and layout.expert > 1:
        return Cut.EXPERTS, layout.expert
    found = tensor.get(spec.site, Cut.WHOLE)
    whole = layout.prefill > 1 and spec.site not in ENDS
    if found is Cut.WHOLE or layout.tensor == 1 or whole:
        return Cut.WHOLE, 1
    return found, layout.tensor


def divides(extent: int, parts: int, what: str) -> Verdict:
    message = f"{extent} {what} do not divide by {parts}"
    return require(extent % parts == 0, "divides", message, extent=extent, ranks=parts)


def experts_meet(experts: int, layout: LayoutPlan) -> Iterator[Verdict]:
    """Whether experts can be dealt over a layout's expert ranks."""
    yield divides(experts, layout.expert, "experts")
    yield require(
        layout.ranks % layout.expert == 0,
        "ranks",
        f"{layout.expert} expert ranks do not divide {layout.ranks} ranks",
    )


def cut_by_blocks(
    extents: Iterable[tuple[str, int]],
    blocks: Mapping[str, tuple[int, int]],
    cut: Callable[[WeightSpec, LayoutPlan], tuple[Cut, int]],
    layout: LayoutPlan,
) -> Iterator[Verdict]:
    """Whether every rank's part of `extents` (site, what tensor ranks cut) is whole blocks of
    scales. `blocks`: site -> rows and columns that share a scale (1, 1 where nothing does)."""
    for site, extent in extents:
        role = "experts" if site.startswith("experts.") else "weight"
        kind, parts = cut(WeightSpec("", site, (), (0,), role=role), layout)
        if kind in (Cut.ROWS, Cut.COLUMNS):
            block = blocks.get(site, (1, 1))[0 if kind is Cut.ROWS else 1]
            yield whole_blocks(site, extent, parts, block)


def whole_blocks(site: str, extent: int, parts: int, block: int) -> Verdict:
    """Whether `extent` over `parts` ranks is whole blocks."""
    return require(
        extent % parts == 0 and extent // parts % block == 0,
        "shard-block",
        f"{site}: {extent} over {parts} ranks is {extent / parts:g}, "
        f"not a multiple of the block of {block}",
        site=site,
        extent=extent,
        ranks=parts,
        block=block,
    )
