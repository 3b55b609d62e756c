"""What these models cost by arithmetic alone: parameters, FLOPs, bytes read. No torch.

Attention is in its absorbed form: a query-key pair costs 2 H (2 r + d_r) FLOPs, and each token
2 H r (d_n + d_v) to go into and out of the latent. Scoring costs 2 H_i D a pair, by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metainfer.kv.book.spec import CacheSpec
from metainfer.models.common.counts import capped_sum, distinct_experts
from metainfer.models.dsa import weights

if TYPE_CHECKING:
    from metainfer.models.dsa.arch import DsaArch


def parameters(arch: DsaArch) -> int:
    """Every parameter of the model, with the draft layer where `mtp` says so."""
    specs = (*weights.packed_weights(arch), *weights.plain_weights(arch))
    return sum(spec.elements for spec in specs)


@dataclass(frozen=True, slots=True)
class Costs:
    """`models.arch.Costs` of this family."""

    arch: DsaArch

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
        return 0

    @property
    def layer_launches(self) -> float:
        return 35

    def distinct_experts(self, tokens: int) -> float:
        return distinct_experts(self.arch.experts, self.arch.experts_per_token, tokens)

    def decode_attention_flops(self, context: int) -> tuple[float, float]:
        keys = min(context, self.arch.index_topk)
        return self._pair * keys + self._absorbed, self._score * context

    def prefill_attention_flops(self, tokens: int) -> tuple[float, float]:
        keys = capped_sum(tokens, self.arch.index_topk)
        return self._pair * keys + self._absorbed * tokens, self._score * float(tokens) ** 2 / 2

    def cache_reads(self, specs: Sequence[CacheSpec], context: int) -> float:
        """Chosen latents and every index key."""
        near = min(context, self.arch.index_topk)
        each = {"kv": near, "index": context}
        return float(sum(each[spec.name] * spec.form.bytes for spec in specs))

    @property
    def _pair(self) -> float:
        arch = self.arch
        return arch.layers * 2.0 * arch.heads * (2 * arch.kv_rank + arch.rope_dim)

    @property
    def _absorbed(self) -> float:
        arch = self.arch
        return arch.layers * 2.0 * arch.heads * arch.kv_rank * (arch.nope + arch.v_dim)

    @property
    def _score(self) -> float:
        return sum(self.arch.full) * 2.0 * self.arch.index_heads * self.arch.index_dim
