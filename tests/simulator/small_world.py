"""A world with prices one can compute by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.form import plain
from metainfer.kv.book.spec import CacheSpec, GroupKind, form_groups
from metainfer.planner.amounts import Amounts, Price
from metainfer.planner.steps import StepCost
from metainfer.planner.work import RankWork
from metainfer.scheduler.config import SchedulerConfig
from metainfer.simulator.run import World

VOCAB = 1000


@dataclass(frozen=True)
class NoAttention:
    """`models.arch.Costs` of a model whose attention is free."""

    hidden: int = 8
    experts_per_token: int = 0
    layer_launches: float = 1

    def distinct_experts(self, tokens: int) -> float:
        return 0.0

    def decode_attention_flops(self, context: int) -> tuple[float, float]:
        return 0.0, 0.0

    def prefill_attention_flops(self, tokens: int) -> tuple[float, float]:
        return 0.0, 0.0

    def cache_reads(self, specs: Sequence[CacheSpec], context: int) -> float:
        return 0.0


def price(phase: Phase, amounts: Amounts) -> float:
    """A hundredth of a second a step and a thousandth a row."""
    return 0.01 + 0.001 * amounts.rows


def world(
    *,
    running: int = 4,
    pages: int = 400,
    page: int = 16,
    context: int = 4096,
    step: int = 256,
    mixed: int = 64,
    drafts: int = 0,
    domains: int = 1,
    caching: bool = True,
    request_s: float = 0.0,
    token_s: float = 0.0,
    price: Price = price,
) -> World:
    spec = CacheSpec(layer=0, name="kv", kind=GroupKind.PAGED, form=plain("test", 8, "uint8"))
    sizes = CacheSizes(groups=form_groups((spec,), page_tokens=page), pages=(pages,), slots=running)
    work = RankWork(
        layout=LayoutPlan(name="test", data=domains),
        layers=1,
        vocab=VOCAB,
        experts=1,
        width=2,
        dense=1.0,
        head=1.0,
        routed=0.0,
        dense_bytes=1.0,
        expert_bytes=0.0,
        costs=NoAttention(),
    )
    return World(
        config=SchedulerConfig(
            max_context=context,
            max_running=running,
            step_tokens=step,
            mixed_prefill_tokens=mixed,
            max_waiting=1 << 20,
            max_drafts=drafts,
        ),
        sizes=sizes,
        domains=domains,
        cost=StepCost(work, None),
        price=price,
        caching=caching,
        request_s=request_s,
        token_s=token_s,
    )
