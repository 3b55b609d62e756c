"""Which part of each weight a rank holds, per layout, and every reason why a layout cannot be.

There is one latent head: tensor parallelism does not shard the cache, and what makes the latent,
the entries and the index keys stays whole on every rank. Query heads are cut by output groups, so
that a group's projection needs no exchange. No torch.
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
    """See `cut_of`."""
    return cut_of(spec, layout, _TENSOR)


def objections(
    arch: DeepSeekV4Arch, layout: LayoutPlan, blocks: Mapping[str, tuple[int, int]]
) -> Verdict:
    """Everything that forbids `layout`, in one pass.

    `blocks`: site -> rows and columns that share a scale (1, 1 where nothing does).
    """
    return all_of(
        (
            divides(arch.o_groups, layout.tensor, "output groups"),
            divides(arch.vocab_size, layout.tensor, "vocabulary rows"),
            *experts_meet(arch.experts, layout),
            *cut_by_blocks(_cut_extents(arch), blocks, cut, layout.decoding),
        )
    )


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
