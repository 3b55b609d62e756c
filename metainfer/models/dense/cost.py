"""What a dense model costs beside its matrices: attention FLOPs and cache bytes. No torch.

A key costs 4 H d FLOPs for all query heads (scores and values); a layer with a window sees at most
that many keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metainfer.kv.book.spec import CacheSpec, GroupKind
from metainfer.models.common.counts import capped_sum

if TYPE_CHECKING:
    from metainfer.models.dense.arch import DenseArch


def decode_keys(arch: DenseArch, context: int) -> int:
    """Keys that one token with `context` tokens reads, over all layers."""
    return sum(min(context, window) if window else context for window in arch.windows)


def prefill_keys(arch: DenseArch, tokens: int) -> float:
    """Keys that a prompt of `tokens` tokens reads: the causal sum, capped by windows."""
    return sum(capped_sum(tokens, window or tokens) for window in arch.windows)


def cache_reads(specs: Sequence[CacheSpec], context: int) -> float:
    """Bytes of caches that one token with `context` tokens reads."""
    return float(
        sum(
            spec.form.bytes
            * (min(context, spec.window) if spec.kind is GroupKind.WINDOW else context)
            for spec in specs
        )
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """`models.arch.Costs` of this family; nothing of its attention is done by every rank."""

    arch: DenseArch

    @property
    def hidden(self) -> int:
        return self.arch.hidden

    @property
    def experts_per_token(self) -> int:
        return 0

    @property
    def exact_logits(self) -> bool:
        return False

    @property
    def draft_width(self) -> int:
        return 0

    @property
    def layer_launches(self) -> float:
        return 12

    def distinct_experts(self, tokens: int) -> float:
        return 0.0

    def decode_attention_flops(self, context: int) -> tuple[float, float]:
        return self._key * decode_keys(self.arch, context), 0.0

    def prefill_attention_flops(self, tokens: int) -> tuple[float, float]:
        return self._key * prefill_keys(self.arch, tokens), 0.0

    def cache_reads(self, specs: Sequence[CacheSpec], context: int) -> float:
        return cache_reads(specs, context)

    @property
    def _key(self) -> float:
        return 4.0 * self.arch.heads * self.arch.head_dim
