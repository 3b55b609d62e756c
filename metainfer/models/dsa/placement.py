"""Which part of each weight a rank holds, per layout, and every reason why a layout cannot be.

What makes the latent and the index keys stays whole on every tensor rank. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Verdict, all_of
from metainfer.models.arch import Cut, WeightSpec
from metainfer.models.common.cuts import cut_by_blocks, cut_of, divides, experts_meet

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
    """See `cut_of`."""
    return cut_of(spec, layout, _TENSOR)


def objections(arch: DsaArch, layout: LayoutPlan, blocks: Mapping[str, tuple[int, int]]) -> Verdict:
    """Everything that forbids `layout`, in one pass.

    `blocks`: site -> rows and columns that share a scale (1, 1 where nothing does).
    """
    return all_of(
        (
            divides(arch.heads, layout.tensor, "query heads"),
            divides(arch.vocab_size, layout.tensor, "vocabulary rows"),
            *experts_meet(arch.experts, layout),
            *cut_by_blocks(_cut_extents(arch), blocks, cut, layout.decoding),
        )
    )


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
