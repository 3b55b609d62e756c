"""Which part of each weight a rank holds, per layout, and every reason why a layout cannot be.

What makes the latent and the index keys stays whole on every tensor rank. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Verdict, all_of, require
from metainfer.models.arch import Cut, WeightSpec

if TYPE_CHECKING:
    from metainfer.models.dsa.arch import DsaArch

_TENSOR: Mapping[str, Cut] = {
    "embed": Cut.ROWS,
    "linear.lm_head": Cut.ROWS,
    "linear.q_b": Cut.ROWS,
    "absorb": Cut.ROWS,
    "linear.o": Cut.COLUMNS,
    "linear.gate_up": Cut.ROWS,
    "linear.down": Cut.COLUMNS,
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


def objections(arch: DsaArch, layout: LayoutPlan, blocks: Mapping[str, tuple[int, int]]) -> Verdict:
    """Everything that forbids `layout`, in one pass.

    `blocks`: site -> rows and columns that share a scale (1, 1 where nothing does).
    """
    tensor, expert = layout.tensor, layout.expert
    checks = [
        _divides(arch.heads, tensor, "query heads"),
        _divides(arch.vocab_size, tensor, "vocabulary rows"),
        _divides(arch.experts, expert, "experts"),
        require(
            layout.ranks % expert == 0,
            "ranks",
            f"{expert} expert ranks do not divide {layout.ranks} ranks",
        ),
    ]
    for site, extent in _cut_extents(arch):
        role = "experts" if site.startswith("experts.") else "weight"
        kind, parts = cut(WeightSpec("", site, (), (0,), role=role), layout.decoding)
        if kind not in (Cut.ROWS, Cut.COLUMNS):
            continue
        block = blocks.get(site, (1, 1))[0 if kind is Cut.ROWS else 1]
        checks.append(
            require(
                extent % parts == 0 and extent // parts % block == 0,
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


def on_rank(arch: DsaArch, layout: LayoutPlan) -> DsaArch:
    """What ops, caches and activations of one rank follow from."""
    tensor = layout.tensor
    return replace(
        arch,
        heads=-(-arch.heads // tensor),
        ffn=-(-arch.ffn // tensor),
        dense_ffn=-(-arch.dense_ffn // tensor),
        ranks=tensor,
        expert_ranks=layout.expert,
    )


def _cut_extents(arch: DsaArch) -> tuple[tuple[str, int], ...]:
    """Site and the extent that tensor parallelism cuts."""
    shared = arch.ffn * arch.shared_experts
    return (
        ("linear.q_b", arch.heads * (arch.nope + arch.rope_dim)),
        ("linear.o", arch.heads * arch.v_dim),
        ("linear.gate_up", arch.dense_ffn),
        ("linear.down", arch.dense_ffn),
        ("linear.shared13", shared),
        ("linear.shared2", shared),
        ("experts.w13", arch.ffn),
        ("experts.w2", arch.ffn),
    )


def _divides(extent: int, parts: int, what: str) -> Verdict:
    message = f"{extent} {what} do not divide by {parts}"
    return require(extent % parts == 0, "divides", message, extent=extent, ranks=parts)
