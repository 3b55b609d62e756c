"""Which part of each weight a rank holds, per layout, and every reason why a layout cannot be.

There is one latent head: tensor parallelism does not shard the cache, and what makes the latent,
the entries and the index keys stays whole on every rank. Query heads are cut by output groups, so
that a group's projection needs no exchange. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Verdict, all_of, require
from metainfer.models.arch import Cut, WeightSpec

if TYPE_CHECKING:
    from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch


_TENSOR: Mapping[str, Cut] = {
    "embed": Cut.ROWS,
    "linear.lm_head": Cut.ROWS,
    "linear.wq_b": Cut.ROWS,
    "attn_sparse": Cut.ROWS,  # the sinks of its heads
    "out_group": Cut.ROWS,
    "linear.wo_b": Cut.COLUMNS,
    "linear.shared13": Cut.ROWS,
    "linear.shared2": Cut.COLUMNS,
    "experts.w13": Cut.ROWS,
    "experts.w2": Cut.COLUMNS,
}


def cut(spec: WeightSpec, layout: LayoutPlan) -> tuple[Cut, int]:
    """How a weight is cut and into how many parts. Of a pair a rank holds every part but of
    experts and vocabulary: chunks need them all."""
    if spec.role == "experts" and layout.expert > 1:
        return Cut.EXPERTS, layout.expert
    found = _TENSOR.get(spec.site, Cut.WHOLE)
    whole = layout.prefill > 1 and spec.site not in ("embed", "linear.lm_head")
    if found is Cut.WHOLE or layout.tensor == 1 or whole:
        return Cut.WHOLE, 1
    return found, layout.tensor


def objections(
    arch: DeepSeekV4Arch, layout: LayoutPlan, blocks: Mapping[str, tuple[int, int]]
) -> Verdict:
    """Everything that forbids `layout`, in one pass.

    `blocks`: site -> rows and columns that share a scale (1, 1 where nothing does).
    """
    tensor, expert = layout.tensor, layout.expert
    checks = [
        _divides(arch.o_groups, tensor, "output groups"),
        _divides(arch.vocab_size, tensor, "vocabulary rows"),
        _divides(arch.experts, expert, "experts"),
        require(
            layout.ranks % expert == 0,
            "ranks",
            f"{expert} expert ranks do not divide {layout.ranks} ranks",
        ),
    ]
    for site, extent in _cut_extents(arch):
        spec = WeightSpec("", site, (), (0,), role=_role(site))
        kind, parts = cut(spec, layout.decoding)
        if kind not in (Cut.ROWS, Cut.COLUMNS):
            continue
        block = blocks.get(site, (1, 1))[0 if kind is Cut.ROWS else 1]
        share = extent // parts
        checks.append(
            require(
                extent % parts == 0 and share % block == 0,
                "shard-block",
                f"{site}: {extent} over {parts} ranks is {extent / parts:g}, "
                f"not a multiple of the block of {block}",
                site=site,
                extent=extent,
                ranks=parts,
                block=block,
            )
        )
    return all_of(checks)


def on_rank(arch: DeepSeekV4Arch, layout: LayoutPlan) -> DeepSeekV4Arch:
    """What ops, caches and activations of one rank follow from: its heads, its experts or its part
    of each.

    Experts that ranks share get the tokens of all of them: as many rows in all as a part of every
    expert would give.
    """
    tensor = layout.tensor
    return replace(
        arch,
        heads=-(-arch.heads // tensor),
        o_groups=-(-arch.o_groups // tensor),
        ffn=-(-arch.ffn // tensor),
        ranks=tensor,
        expert_ranks=layout.expert,
        chunk_heads=arch.heads if layout.prefill > 1 else 0,
        shards=layout.shards,
    )


def rank_elements(arch: DeepSeekV4Arch, layout: LayoutPlan) -> dict[str, int]:
    """Matrix elements that one rank holds, by site."""
    found: dict[str, int] = {}
    for spec in arch.packed_weights():
        _, parts = cut(spec, layout)
        found[spec.site] = found.get(spec.site, 0) + math.ceil(spec.elements / parts)
    return found


def _cut_extents(arch: DeepSeekV4Arch) -> tuple[tuple[str, int], ...]:
    """Site and the extent that tensor parallelism cuts."""
    groups = arch.o_groups * arch.o_rank
    return (
        ("linear.wq_b", arch.heads * arch.head_dim),
        ("out_group", groups),
        ("linear.wo_b", groups),
        ("linear.shared13", arch.ffn),
        ("linear.shared2", arch.ffn),
        ("experts.w13", arch.ffn),
        ("experts.w2", arch.ffn),
    )


def _role(site: str) -> str:
    return "experts" if site.startswith("experts.") else "weight"


def _divides(extent: int, parts: int, what: str) -> Verdict:
    message = f"{extent} {what} do not divide by {parts}"
    return require(extent % parts == 0, "divides", message, extent=extent, ranks=parts)
