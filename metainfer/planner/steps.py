"""What a step must compute, read and send, and how many seconds that takes.

One price for the plan's table, the simulator and what calibrates them. The work of a segment is a
few amounts of the rank that does most of it (`Amounts`). Uncalibrated, the seconds are those of a
bound over a share: the larger of bytes over the read rate and FLOPs over the matrix rate, then the
collectives of `comm.model` one after the other; nothing is overlapped. Calibrated, they come from
measured steps (`calibration`).

Communication per layer (bf16 activations, width D, b tokens of a domain):

* tensor ranks: all-reduce of b D twice; once when experts are cut over more ranks than the domain;
* expert ranks E beyond the domain: each token goes to E (1 - (1 - 1/E)^k) ranks, D + D / 128 bytes
  there and 2 D bytes back; a domain's ranks send a part each and gather the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.comm import model as links
from metainfer.comm.topology import Topology, from_facts
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase, Segment
from metainfer.kv.book.spec import CacheSpec
from metainfer.models.arch import Costs
from metainfer.planner.amounts import Amounts
from metainfer.planner.ranks import Held
from metainfer.planner.weights import DTYPE_BYTES, EMBED, EXPERTS, Census
from metainfer.platform.facts import CPU, Facts

SHARE, LOW, HIGH = 0.5, 0.2, 1.0
"""Of the bound: what is predicted, and the ends of the band (seeds)."""

HEAD = "linear.lm_head"
TABLES = "rotary tables"
SHORT = 8
"""Tokens of the longest run that reads its cache once, as a decode or a verify run does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's part of a model under one layout, in numbers.

    `dense`, `head`, `routed`: matrix elements that a token passes on this rank. `dense_bytes`: read
    in every step; `expert_bytes`: all routed experts of this rank. `width`: bytes of an activation
    element. `specs`: caches whose bytes `costs` counts.
    """

    layout: LayoutPlan
    layers: int
    vocab: int
    experts: int
    width: int
    dense: float
    head: float
    routed: float
    dense_bytes: float
    expert_bytes: float
    costs: Costs
    specs: tuple[CacheSpec, ...] = ()


def rank_work(counted: Census, held: Held, costs: Costs, dtype: str) -> RankWork:
    """The work of a model whose headers were counted, as one card holds it."""
    arch, layout = counted.arch, held.layout
    elements, whole = counted.elements(layout), counted.elements()
    routed = [site for site in elements if site.startswith(f"{EXPERTS}.")]
    sites = {row.item: row.bytes for row in held.weights}
    expert_bytes = sum(sites.get(site, 0) for site in routed)
    embedding = sites.get(EMBED, 0) if HEAD in sites else 0  # a tied head is read where it is held
    return RankWork(
        layout=layout,
        layers=arch.layers,
        vocab=arch.vocab_size,
        experts=max(arch.routed_experts, 1),
        width=DTYPE_BYTES[dtype],
        dense=sum(n for site, n in elements.items() if site not in (EMBED, HEAD, *routed)),
        head=elements.get(HEAD, 0),
        routed=sum(whole[site] for site in routed)
        * costs.experts_per_token
        / max(arch.routed_experts, 1)
        / layout.tensor,
        dense_bytes=sum(sites.values()) - expert_bytes - embedding - sites.get(TABLES, 0),
        expert_bytes=expert_bytes,
        costs=costs,
        specs=held.specs,
    )


@dataclass(frozen=True, slots=True)
class Bound:
    """The uncalibrated price. `read`: bytes/s, `rate`: FLOP/s or None where it is unknown."""

    read: float
    rate: float | None
    share: float = SHARE

    def __call__(self, phase: Phase, amounts: Amounts) -> float:
        flops = amounts.flops + amounts.attention
        busy = max(amounts.moved / self.read, flops / self.rate if self.rate else 0.0)
        return (busy + amounts.sent) / self.share


def bound(facts: Facts, dtype: str, share: float = SHARE) -> Bound | None:
    """The uncalibrated price on a machine; None where its read rate is unknown."""
    device = facts.device
    read = device.read_bytes_s
    if read is None and device.kind == CPU:
        read = facts.host.read_bytes_s
    return None if read is None else Bound(read, device.dot_flops.get(dtype), share)


class StepCost:
    """Amounts of steps under one layout.

    Args:
        tree: the machine's links, for layouts whose ranks talk.
    """

    def __init__(self, work: RankWork, tree: Topology | None) -> None:
        self.work = work
        self.tree = tree if max(work.layout.tensor, work.layout.expert) > 1 else None
        self._sent_s: dict[tuple[int, int], float] = {}

    @property
    def assumed(self) -> tuple[str, ...]:
        """What stands in for unknown facts of the links."""
        return self.tree.assumed if self.tree is not None else ()

    def decode(self, batch: int, context: int) -> Amounts:
        """`batch` sequences over all domains, each with `context` tokens."""
        work = self.work
        tokens = -(-batch // work.layout.data)
        return Amounts(
            tokens,
            2.0 * tokens * (work.dense + work.head + work.routed),
            tokens * self._shared(work.costs.decode_attention_flops(context)),
            self._weights(self._met(tokens, batch)) + tokens * self._cached(context),
            self._sent(tokens, tokens),
        )

    def prefill(self, tokens: int, prompt: int) -> Amounts:
        """A chunk of `tokens` tokens in each domain, of prompts of `prompt` tokens."""
        work = self.work
        return Amounts(
            tokens,
            2.0 * tokens * (work.dense + work.routed),
            tokens / prompt * self._shared(work.costs.prefill_attention_flops(prompt)),
            self._weights(self._met(tokens, tokens * work.layout.data)),
            self._sent(tokens, 1),
        )

    def segment(self, segment: Segment) -> Amounts:
        """The work of one segment of a step plan; padding counts as rows without context."""
        ranks = segment.ranks
        everyone = sum(rank.tokens + rank.padding for rank in ranks)
        found = [
            self.runs(
                [(run.start, len(run.tokens)) for run in rank.runs],
                scored=sum(run.logits for run in rank.runs),
                everyone=everyone,
                padding=rank.padding,
            )
            for rank in ranks
        ]
        return max(found, key=lambda each: (each.flops + each.attention, each.moved))

    def runs(
        self,
        runs: Sequence[tuple[int, int]],
        *,
        scored: int,
        everyone: int | None = None,
        padding: int = 0,
    ) -> Amounts:
        """One domain's (start, tokens) runs, `scored` rows of which need logits.

        `everyone`: tokens over all domains of the segment, which choose experts together.
        """
        work = self.work
        tokens = sum(count for _, count in runs) + padding
        attention, cached, rows, short, ends = 0.0, 0.0, 0, 0, 0
        for start, count in runs:
            if count > SHORT:
                before = work.costs.prefill_attention_flops(start) if start else (0.0, 0.0)
                after = work.costs.prefill_attention_flops(start + count)
                attention += self._shared((after[0] - before[0], after[1] - before[1]))
            else:
                rows, short, ends = rows + count, short + 1, ends + start + count
        if short:
            # Their contexts lie close together in what they cost: the mean stands for each.
            mean = ends // short
            attention += rows * self._shared(work.costs.decode_attention_flops(mean))
            cached = short * self._cached(mean)
        met = self._met(tokens, everyone or tokens)
        return Amounts(
            tokens,
            2.0 * (tokens * (work.dense + work.routed) + scored * work.head),
            attention,
            self._weights(met) + cached,
            self._sent(tokens, max(scored, 1)),
        )

    def _shared(self, flops: tuple[float, float]) -> float:
        """FLOPs by heads, which tensor ranks share, and those that each of them does."""
        return flops[0] / self.work.layout.tensor + flops[1]

    def _cached(self, context: int) -> float:
        return self.work.costs.cache_reads(self.work.specs, context)

    def _met(self, tokens: int, everyone: int) -> int:
        """Tokens that the experts of one rank choose from."""
        domains = max(1, self.work.layout.expert // self.work.layout.tensor)
        return min(everyone, tokens * domains)

    def _weights(self, tokens: int) -> float:
        work = self.work
        share = work.costs.distinct_experts(tokens) / work.experts
        return work.dense_bytes + share * work.expert_bytes

    def _sent(self, tokens: int, scored: int) -> float:
        """All collectives of a step of `tokens` tokens a domain; `scored` of them need logits."""
        if self.tree is None:
            return 0.0
        key = (tokens, scored)
        if key not in self._sent_s:
            self._sent_s[key] = self._collectives(tokens, scored)
        return self._sent_s[key]

    def _collectives(self, tokens: int, scored: int) -> float:
        work = self.work
        tensor, expert, wide = work.layout.tensor, work.layout.expert, work.costs.hidden
        row, micros = tokens * wide * work.width, 0.0
        if tensor > 1:
            apart = expert > tensor  # the experts' sum comes back by another way
            micros += (1 if apart else 2) * work.layers * self._reduced(tensor, row)
            micros += self._reduced(tensor, row)  # the embedding's
            micros += self._direct(tensor, scored * work.vocab * work.width)
        if expert > tensor:
            ranks = expert * (1 - (1 - 1 / expert) ** work.costs.experts_per_token)
            out = tokens / tensor * ranks
            each = self._direct(expert, out * (wide + wide / 128))
            each += self._direct(expert, out * wide * work.width)
            if tensor > 1:
                each += self._direct(tensor, row)
            micros += work.layers * each
        return micros / 1e6

    def _reduced(self, ranks: int, size: float) -> float:
        tree = self._group(ranks)
        return links.best(links.PEER if tree.peer else links.HOST, tree, int(size))[1]

    def _direct(self, ranks: int, size: float) -> float:
        tree = self._group(ranks)
        return links.direct(tree, int(size), through_host=not tree.peer)

    def _group(self, ranks: int) -> Topology:
        """One group's tree."""
        assert self.tree is not None
        return self.tree.group(ranks, self.work.layout.ranks)


def step_cost(
    counted: Census, held: Held, facts: Facts, dtype: str, tree: Topology | None = None
) -> StepCost | None:
    """Steps of a layout on a machine; None where the family has no cost model.

    `tree`: the links, where they are not those of the machine that computes.
    """
    costs = counted.arch.costs()
    if costs is None:
        return None
    # Processes of one host meet in its memory: no bus, and nothing that has a price yet.
    talks = max(held.layout.tensor, held.layout.expert) > 1
    if talks and tree is None and facts.device.kind != CPU:
        tree = from_facts(facts)
    return StepCost(rank_work(counted, held, costs, dtype), tree if talks else None)
