"""What one card holds under a layout, as `cards` found it, and the capacity that it has so."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.plan import LayoutPlan, LedgerRow, StepGraph
from metainfer.kv.book.spec import CacheSpec, GroupSpec
from metainfer.planner.limits import longest_context, most_sequences
from metainfer.planner.memory import CacheBudget, kv_rows
from metainfer.planner.needs import Needs

MOST_SEQUENCES = 4096
"""Where capacity pairs stop counting sequences of one domain."""

CONTEXTS = (8_192, 32_768, 131_072, 524_288)
"""Contexts at which capacity is stated, beside the longest that fits."""


@dataclass(frozen=True, slots=True)
class Held:
    """One card's memory under one layout and packing. `cache` is that of its KV domain; `beside`:
    rows that are neither weights nor cache. `budget_bytes`: what the cache could take.
    `prompt_specs`: the caches as a rank computes them for prompts, of all heads where it has them.
    `wanted`: the steps whose capture it has room for; `prefill_from`: of a pair, as far as they are
    chunks, or as asked for. `measured`: what steps were seen to need here, where that was used.
    """

    layout: LayoutPlan
    weights: tuple[LedgerRow, ...]
    specs: tuple[CacheSpec, ...]
    prompt_specs: tuple[CacheSpec, ...]
    groups: tuple[GroupSpec, ...]
    cache: CacheBudget
    beside: tuple[LedgerRow, ...]
    budget_bytes: int
    wanted: tuple[StepGraph, ...] = ()
    prefill_from: int = 0
    measured: Needs | None = None

    @property
    def running(self) -> int:
        """Sequences over all domains that have a slot."""
        return self.cache.sizes.slots * self.layout.data

    @property
    def kv_tokens(self) -> int:
        """Cached tokens over all domains."""
        return self.cache.tokens * self.layout.data

    def ledger(self) -> tuple[LedgerRow, ...]:
        return (*self.weights, *kv_rows(self.cache.sizes, self.cache.tokens), *self.beside)

    def longest(self, step_tokens: int, limit: int) -> int:
        """Tokens of the longest sequence that fits, alone in its domain."""
        return longest_context(self.groups, self.budget_bytes, step_tokens, limit)

    def pairs(self, step_tokens: int, limit: int) -> tuple[tuple[int, int], ...]:
        """(context, sequences of that length at once over all domains), up to the longest."""
        longest = self.longest(step_tokens, limit)
        contexts = [n for n in CONTEXTS if n < longest] + ([longest] if longest else [])
        return tuple(
            (
                context,
                self.layout.data
                * most_sequences(
                    self.groups, self.budget_bytes, context, step_tokens, MOST_SEQUENCES
                ),
            )
            for context in contexts
        )
