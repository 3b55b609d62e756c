"""What DeepSeek-V4 costs by arithmetic alone: parameters, FLOPs, bytes read. No torch.

Everything follows from the weights' shapes and the sets of keys a query reads; a product of n
parameters with one token is 2 n FLOPs, a key is 4 H d of them (scores and values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metainfer.kv.book.spec import CacheSpec, GroupKind
from metainfer.models.common.counts import capped_sum, distinct_experts
from metainfer.models.deepseek_v4 import weights

if TYPE_CHECKING:
    from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch

_ENDS = ("embed", "linear.lm_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Counts. `dense`: all layers without routed experts; `expert`: one of them."""

    embed: int
    head: int
    dense: int
    routed: int
    expert: int

    @property
    def total(self) -> int:
        return self.embed + self.head + self.dense + self.routed


def parameters(arch: DeepSeekV4Arch) -> Parameters:
    """Parameters by part; tables of integers are none."""
    packed = weights.packed_weights(arch)
    ends = {spec.site: spec.elements for spec in packed if spec.site in _ENDS}
    routed = sum(spec.elements for spec in packed if spec.role == "experts")
    plain = sum(s.elements for s in weights.plain_weights(arch) if s.dtype != "int64")
    dense = sum(s.elements for s in packed if s.role != "experts" and s.site not in _ENDS)
    return Parameters(
        embed=ends["embed"],
        head=ends["linear.lm_head"],
        dense=dense + plain,
        routed=routed,
        expert=3 * arch.hidden * arch.ffn,
    )


def active(arch: DeepSeekV4Arch) -> int:
    """Parameters that one token passes, with the head and without the embedding."""
    each = parameters(arch)
    return each.dense + each.head + arch.layers * arch.experts_per_token * each.expert


def decode_flops(arch: DeepSeekV4Arch, context: int) -> dict[str, float]:
    """FLOPs of one token that sees `context` tokens, by part."""
    csa, hca = arch.kinds.count("csa"), arch.kinds.count("hca")
    key = 4.0 * arch.heads * arch.head_dim
    near = min(context, arch.window)
    entries = context // arch.csa
    chosen = min(arch.index_topk, entries)
    return {
        "products": 2.0 * active(arch),
        "csa": csa * key * (near + chosen),
        "index": csa * 2.0 * arch.index_heads * arch.index_dim * entries,
        "hca": hca * key * (near + context // arch.hca),
        "window": arch.kinds.count("window") * key * near,
    }


def prefill_attention(arch: DeepSeekV4Arch, tokens: int) -> tuple[float, float]:
    """FLOPs of attention in a prompt of `tokens` tokens: by query heads, and the indexer's."""
    csa, hca = arch.kinds.count("csa"), arch.kinds.count("hca")
    key, n = 4.0 * arch.heads * arch.head_dim, float(tokens)
    near = capped_sum(tokens, arch.window)
    # Sum over positions of min(top_k, t // ratio): the ramp, then the plateau.
    chosen = arch.csa * capped_sum(tokens // arch.csa, arch.index_topk)
    heads = (
        csa * key * (near + chosen)
        + hca * key * (near + n * n / (2 * arch.hca))
        + arch.kinds.count("window") * key * near
    )
    return heads, csa * 2.0 * arch.index_heads * arch.index_dim * n * n / (2 * arch.csa)


def cache_reads(arch: DeepSeekV4Arch, specs: Sequence[CacheSpec], context: int) -> float:
    """Bytes of caches that one token with `context` tokens reads: windows, the chosen entries or
    all of them, every index key."""
    chosen = {layer for layer, kind in enumerate(arch.kinds) if kind == "csa"}
    total = 0.0
    for spec in specs:
        if spec.kind is GroupKind.WINDOW:
            total += min(context, spec.window) * spec.form.bytes
        elif spec.kind is GroupKind.PAGED:
            entries = context // spec.tokens_per_entry
            if spec.name == "entries" and spec.layer in chosen:
                entries = min(entries, arch.index_topk)
            total += entries * spec.form.bytes
    return total


@dataclass(frozen=True, slots=True)
class Costs:
    """`models.arch.Costs` of this family."""

    arch: DeepSeekV4Arch

    @property
    def hidden(self) -> int:
        return self.arch.hidden

    @property
    def experts_per_token(self) -> int:
        return self.arch.experts_per_token

    @property
    def exact_logits(self) -> bool:
        return True

    @property
    def draft_width(self) -> int:
        return self.arch.streams * self.arch.hidden if self.arch.mtp else 0

    @property
    def layer_launches(self) -> float:
        return 41

    def distinct_experts(self, tokens: int) -> float:
        return distinct_experts(self.arch.experts, self.arch.experts_per_token, tokens)

    def decode_attention_flops(self, context: int) -> tuple[float, float]:
        each = decode_flops(self.arch, context)
        return each["csa"] + each["hca"] + each["window"], each["index"]

    def prefill_attention_flops(self, tokens: int) -> tuple[float, float]:
        return prefill_attention(self.arch, tokens)

    def cache_reads(self, specs: Sequence[CacheSpec], context: int) -> float:
        return cache_reads(self.arch, specs, context)
