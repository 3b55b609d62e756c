"""Models that are not in the tree, as numbers from their reference documents: what a rank holds.

Counts are millions of parameters (`M`) of the published configurations: DeepSeek-V4.1-Flash and
GLM-5.2/5.3 with routed experts in four bits (MXFP4, NVFP4) and everything else in FP8 or BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.core.plan import LayoutPlan
from metainfer.kv.book.spec import CacheSpec
from metainfer.planner.layouts import Fetch
from metainfer.planner.work import RankWork

M = 1e6
MILLION = 1 << 20


def capped(count: int, cap: int) -> float:
    """Sum of min(t, cap) over t = 1 .. count."""
    ramp = min(count, cap)
    return ramp * (ramp + 1) / 2 + (count - ramp) * float(cap)


@dataclass(frozen=True)
class GlmCosts:
    """GLM-5.2/5.3: 78 layers of sparse MLA over 2,048 keys, 21 of them with an indexer."""

    hidden: int = 6144
    experts_per_token: int = 8
    key: float = 78 * 139_264.0  # 2 H (2 r + d) of the absorbed form
    scored: float = 21 * 8192.0  # 2 H_i 128 a key
    row: float = 656.0
    layer_launches: float = 35
    exact_logits: bool = True

    def distinct_experts(self, tokens: int) -> float:
        return 256 * (1 - (1 - 8 / 256) ** tokens)

    def decode_attention_flops(self, context: int) -> tuple[float, float]:
        return self.key * min(context, 2048), self.scored * context

    def prefill_attention_flops(self, tokens: int) -> tuple[float, float]:
        return self.key * capped(tokens, 2048), self.scored * float(tokens) ** 2 / 2

    def cache_reads(self, specs: Sequence[CacheSpec], context: int) -> float:
        return 78 * self.row * min(context, 2048) + 21 * 132.0 * context


@dataclass(frozen=True)
class V41Costs:
    """DeepSeek-V4.1-Flash: 38 layers read 640 keys, three score every token of a prompt."""

    hidden: int = 5120
    experts_per_token: int = 6
    layer_launches: float = 41
    exact_logits: bool = True

    def distinct_experts(self, tokens: int) -> float:
        return 384 * (1 - (1 - 6 / 384) ** tokens)

    def decode_attention_flops(self, context: int) -> tuple[float, float]:
        near = 38 * 131_072.0 * min(context, 640)
        return near, 8192 * (2.5 * context + 4 * min(context, 16_384))

    def prefill_attention_flops(self, tokens: int) -> tuple[float, float]:
        return 1.6e9 * tokens, 6144 * float(tokens) ** 2

    def cache_reads(self, specs: Sequence[CacheSpec], context: int) -> float:
        return 183e6 * context / MILLION + 5.6e6 * min(context, 640) / 640


def glm(tensor: int, shards: int = 1) -> RankWork:
    """One of `tensor` ranks: matrices and experts cut, the indexer on each; the FP8 cache copied to
    each, or dealt over `shards` of them."""
    attention, indexer, expert, dense, head = 165.0, 9.37, 37.75, 226.5, 154_880 * 6144 / M
    cut = 78 * attention + 3 * dense + 75 * expert
    return RankWork(
        layout=LayoutPlan(name=f"tp{tensor}", tensor=tensor, shards=shards),
        layers=78,
        vocab=154_880,
        experts=256,
        width=2,
        dense=M * (cut / tensor + 21 * indexer),
        head=M * head / tensor,
        routed=M * 75 * 8 * expert / tensor,
        dense_bytes=2 * M * ((cut + head) / tensor + 21 * indexer),
        expert_bytes=75 * 256 * expert * M * 0.5625 / tensor,
        costs=GlmCosts(),
        token_bytes=GLM_CACHE["glm"],
        paged_layers=78,
        choosing_layers=21,
        fetches=Fetch.GATHERED if shards > 1 else None,
    )


def v41(tensor: int, *, prompt: bool) -> RankWork:
    """`prompt`: prompts pass half of the model (7.9 to 8.3 of 16.13 billion parameters)."""
    active, head, routed = 8.1e9 if prompt else 16.13e9 - 661.9 * M, 661.9 * M, 40 * 6 * 35.39 * M
    routed = min(routed, active * 0.6) if prompt else routed
    return RankWork(
        layout=LayoutPlan(name=f"tp{tensor}", tensor=tensor),
        layers=20 if prompt else 40,
        vocab=129_280,
        experts=384,
        width=2,
        dense=(active - routed) / tensor,
        head=head / tensor,
        routed=routed / tensor,
        dense_bytes=8.52e9 / tensor * (0.5 if prompt else 1.0),
        expert_bytes=288.8e9 / tensor * (0.5 if prompt else 1.0),
        costs=V41Costs(),
    )


H3_FLOPS = 4 * (4.21e15 + 17.15e15)
"""15 s of video, 768 lines, 4 forwards: linear layers and dense attention."""

GLM_CACHE = {"glm": 53_940, "glm-bf16": 92_628}
"""Bytes of a token over all layers: FP8 rows of 656, BF16 rows of 1,152."""


def glm_tokens(card_bytes: float, cards: int, layout: str, spread: int) -> float:
    """Cached tokens of GLM-5.3 with NVFP4 experts on each card of a machine, the cache over
    `spread` of them; 8 % of a card is left to others, 2 GB to activations."""
    weights = glm(cards)
    held = weights.dense_bytes + weights.expert_bytes + 2 * 951.6 * M
    free = card_bytes * 0.92 - held - 2e9
    return spread * free / GLM_CACHE[layout]
