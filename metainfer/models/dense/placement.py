"""Which part of each weight of a dense model a rank holds, and every reason against a layout.

Query and KV heads are cut together, so that a rank's heads find their keys on the rank; gate and
up are cut alike. Where they do not divide, the last rank's part is filled up with zeros, which add
nothing: all ranks have one shape, and a step is as long as the largest part takes anyway. Copied KV
heads, and ranks that would hold zeros alone, are refused. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Verdict, all_of, require
from metainfer.models.arch import Cut, WeightSpec
from metainfer.models.common.cuts import cut_of, whole_blocks

if TYPE_CHECKING:
    from metainfer.models.dense.arch import DenseArch

_TENSOR: Mapping[str, Cut] = {
    "embed": Cut.ROWS,
    "linear.lm_head": Cut.ROWS,
    "linear.qkv": Cut.ROWS,
    "linear.o": Cut.COLUMNS,
    "linear.gate_up": Cut.ROWS,
    "linear.down": Cut.COLUMNS,
}


def cut(spec: WeightSpec, layout: LayoutPlan) -> tuple[Cut, int]:
    """See `cut_of`."""
    return cut_of(spec, layout, _TENSOR)


def objections(
    arch: DenseArch, layout: LayoutPlan, blocks: Mapping[str, tuple[int, int]]
) -> Verdict:
    """Everything that forbids `layout`, in one pass.

    `blocks`: site -> rows and columns that share a scale (1, 1 where nothing does).
    """
    tensor = layout.tensor
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    checks = [
        _all_get(arch.kv_heads, tensor, "KV heads, with their query heads,"),
        _all_get(arch.ffn, tensor, "FFN channels"),
        _all_get(arch.vocab_size, tensor, "vocabulary rows"),
        require(
            layout.expert == 1,
            "experts",
            f"{layout.expert} expert ranks asked, a dense model has no experts",
        ),
        require(
            arch.adapters is None or layout.ranks == 1,
            "adapters",
            f"adapters run on one rank, this layout has {layout.ranks}",
            ranks=layout.ranks,
        ),
    ]
    for site, extent, axis in (
        ("linear.qkv", queries, 0),
        ("linear.qkv", keys, 0),
        ("linear.o", queries, 1),
        ("linear.gate_up", arch.ffn, 0),
        ("linear.down", arch.ffn, 1),
    ):
        block = blocks.get(site, (1, 1))[axis]
        if tensor > 1 and block > 1:  # else the last part is filled up
            checks.append(whole_blocks(site, extent, tensor, block))
    return all_of(checks)


def on_rank(arch: DenseArch, layout: LayoutPlan) -> DenseArch:
    """What ops, caches and activations of one rank follow from: its heads and its channels."""
    tensor = layout.tensor
    kv_heads = -(-arch.kv_heads // tensor)
    return replace(
        arch,
        heads=kv_heads * (arch.heads // arch.kv_heads),
        kv_heads=kv_heads,
        ffn=-(-arch.ffn // tensor),
        ranks=tensor,
    )


def _all_get(extent: int, parts: int, what: str) -> Verdict:
    share = -(-extent // parts)
    message = f"{extent} {what} over {parts} ranks, {share} each, leave a rank without any"
    return require((parts - 1) * share < extent, "divides", message, extent=extent, ranks=parts)
