"""Which part of each weight of a dense model a rank holds, and every reason against a layout.

Query and KV heads are cut together, so that a rank's heads find their keys on the rank; gate and
up are cut alike. Where they do not divide, the last rank's part is filled up with zeros, which add
nothing: all ranks have one shape, and a step is as long as the largest part takes anyway. Ranks
that would hold zeros alone are refused.

Where ranks are a multiple of the KV heads, those that follow each other hold copies of one, and cut
its query heads. What they would cache twice may be dealt over them. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metainfer.core.plan import LayoutPlan
from metainfer.core.verdict import Verdict, all_of, require
from metainfer.models.arch import Cut, WeightSpec
from metainfer.models.common.cuts import cut_of, whole_blocks

if TYPE_CHECKING:
    from metainfer.models.dense.arch import DenseArch

_LAYER = {
    "qkv": Cut.ROWS,
    "o": Cut.COLUMNS,
    "gate_up": Cut.ROWS,
    "down": Cut.COLUMNS,
}
_TENSOR: Mapping[str, Cut] = {
    "embed": Cut.ROWS,
    "linear.lm_head": Cut.ROWS,
    **{f"linear.{name}": kind for name, kind in _LAYER.items()},
    **{f"lora.{name}": kind for name, kind in _LAYER.items()},  # pairs, like their matrices
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
    tensor, copies = layout.tensor, copies_of(arch, layout.tensor)
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    checks = [
        *_heads(arch, layout, copies),
        _all_get(arch.ffn, tensor, "FFN channels"),
        _all_get(arch.vocab_size, tensor, "vocabulary rows"),
        require(
            layout.expert == 1,
            "experts",
            f"{layout.expert} expert ranks asked, a dense model has no experts",
        ),
    ]
    for site, extent, parts, axis in (
        ("linear.qkv", queries, tensor, 0),
        ("linear.qkv", keys, tensor // copies, 0),
        ("linear.o", queries, tensor, 1),
        ("linear.gate_up", arch.ffn, tensor, 0),
        ("linear.down", arch.ffn, tensor, 1),
    ):
        block = blocks.get(site, (1, 1))[axis]
        if parts > 1 and block > 1:  # else the last part is filled up
            checks.append(whole_blocks(site, extent, parts, block))
    return all_of(checks)


def copies_of(arch: DenseArch, tensor: int) -> int:
    """Ranks of `tensor` that hold the same KV head."""
    return tensor // arch.kv_heads if tensor % arch.kv_heads == 0 else 1


def _heads(arch: DenseArch, layout: LayoutPlan, copies: int) -> Iterator[Verdict]:
    """Whether every rank gets heads, and a cache can be dealt over those that hold the same."""
    if copies == 1:
        yield _all_get(arch.kv_heads, layout.tensor, "KV heads, with their query heads,")
    else:
        queries = arch.heads // arch.kv_heads
        yield _all_get(queries, copies, "query heads of a KV head")
        yield require(
            layout.prefill == 1,
            "copies",
            f"{copies} ranks hold copies of each KV head, and a pair's chunks would compute them "
            f"{copies} times",
            copies=copies,
        )
    if layout.shards == 1:
        return
    alone = f"{layout.tensor} tensor ranks keep KV heads of their own: nothing is held twice"
    several = f"{copies} ranks hold each KV head, which are not groups of {layout.shards}"
    yield require(
        copies % layout.shards == 0,
        *("shards", alone if copies == 1 else several),
        ranks=layout.tensor,
        copies=copies,
    )
    yield require(
        0 in arch.windows,
        *("shards", "every layer has a window: no cache grows with the context, nothing is dealt"),
    )


def on_rank(arch: DenseArch, layout: LayoutPlan) -> DenseArch:
    """What ops, caches and activations of one rank follow from: its heads and its channels."""
    tensor, copies = layout.tensor, copies_of(arch, layout.tensor)
    kv_heads = -(-arch.kv_heads // tensor)
    rank = replace(
        arch,
        heads=kv_heads * -(-arch.heads // arch.kv_heads // copies),
        kv_heads=kv_heads,
        ffn=-(-arch.ffn // tensor),
        ranks=tensor,
        shards=layout.shards,
    )
    if arch.adapters is None:
        return rank
    beside = tensor if layout.prefill > 1 else 1
    specs = rank.packed_weights()
    pairs = arch.adapters.on_rank(specs, lambda spec: cut(spec, layout.decoding)[0], beside)
    return replace(rank, adapters=pairs)


def _all_get(extent: int, parts: int, what: str) -> Verdict:
    share = -(-extent // parts)
    message = f"{extent} {what} over {parts} ranks, {share} each, leave a rank without any"
    return require((parts - 1) * share < extent, "divides", message, extent=extent, ranks=parts)
