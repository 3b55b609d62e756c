"""What a step must compute, read and send, and how many seconds that takes.

One price for the plan's table, the simulator and what calibrates them. The work of a segment is a
few amounts of the rank that does most of it (`Amounts`). Uncalibrated, the seconds are those of
`bound`; calibrated, they come from measured steps (`calibration`). Either way collectives are those
of `comm.model` one after the other, a step that no graph holds takes at least as long as its
launches (`launches`), which halves in turns have twice; what these gain is what records say, and
nothing else overlaps.

What ranks send is `exchange`. A layout may have another one for chunks of prompts, which is then
priced by its own work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from metainfer.comm.topology import Topology, from_facts
from metainfer.core.plan import StepGraph
from metainfer.core.step import Phase, RankTokens, Segment
from metainfer.kv.book.spec import GroupKind
from metainfer.planner.amounts import Amounts
from metainfer.planner.exchange import Exchange, Sent
from metainfer.planner.held import Held
from metainfer.planner.launches import sharing
from metainfer.planner.layouts import prompt_domains, talks
from metainfer.planner.weights import Census
from metainfer.planner.work import RankWork, rank_work
from metainfer.platform.facts import CPU, Facts

SHORT = 8
"""Tokens of the longest run that reads its cache once, as a decode or a verify run does."""


@dataclass(frozen=True, slots=True)
class Halves:
    """Chunks of at least `least` tokens are two halves in turns; 0: none. `gains`: seconds without
    over with, by tokens, as they were measured of such cards and layout."""

    least: int = 0
    gains: Mapping[int, float] = field(default_factory=dict)

    def gain(self, tokens: int) -> float:
        """Of a chunk of `tokens` tokens: of the longest measured one up to it, else none."""
        return self.gains[max(known)] if (known := [n for n in self.gains if n <= tokens]) else 1.0


WHOLE = Halves()


class StepCost:
    """Amounts of steps under one layout.

    Args:
        tree: the machine's links, for layouts whose ranks talk.
        prompts: what chunks of prompts cost, where they have a layout of their own.
        graphs: steps that are captured, all others run op by op; None: decodes and verify runs are.
        prefill_from: chunks of fewer tokens are computed as decodes are all the same.
        halves: which chunks, where no graph holds them, are computed as two halves in turns.
    """

    def __init__(
        self,
        work: RankWork,
        tree: Topology | None,
        prompts: StepCost | None = None,
        graphs: Sequence[StepGraph] | None = None,
        prefill_from: int = 0,
        halves: Halves = WHOLE,
    ) -> None:
        self.work, self.prompts, self._graphs = work, prompts, graphs
        self._prefill_from, self._halves = prefill_from, halves
        self.tree = tree if talks(work.layout) else None
        self._exchange = None if self.tree is None else Exchange(work, self.tree)

    @property
    def assumed(self) -> tuple[str, ...]:
        """What stands in for unknown facts of the links."""
        found = self.tree.assumed if self.tree is not None else ()
        return found or (self.prompts.assumed if self.prompts is not None else ())

    @property
    def _of_prompts(self) -> StepCost:
        return self if self.prompts is None else self.prompts

    def decode(self, batch: int, context: int) -> Amounts:
        """`batch` sequences over all domains, each with `context` tokens."""
        work = self.work
        tokens = -(-batch // work.layout.data)
        replayed = self._replayed(Phase.DECODE, tokens, tokens)
        return Amounts(
            tokens,
            2.0 * tokens * (work.dense + work.head + work.routed),
            tokens * self._decoding(context),
            self._weights(self._met(tokens, batch)) + tokens * self._cached(context),
            self._sent(Sent(tokens, tokens, decoding=tokens, eager=not replayed)),
            self._kernels,
            0.0 if replayed else self._kernels,
        )

    def prefill(self, tokens: int, prompt: int) -> Amounts:
        """A chunk of `tokens` tokens in each domain (of all cards, where these share its rows), of
        prompts of `prompt` tokens."""
        cost = self if tokens < self._prefill_from else self._of_prompts
        return cost._chunk(tokens, prompt)

    def halved(self, tokens: int) -> tuple[Amounts, Amounts]:
        """A lone prompt of `tokens` tokens, as `prefill` has it: whole, and as halves in turns. A
        captured chunk is whole either way."""
        cost = self if tokens < self._prefill_from else self._of_prompts
        return cost._chunk(tokens, tokens, halves=0), cost._chunk(tokens, tokens, halves=1)

    def eager_from(self, least: int) -> int:
        """Tokens of the shortest lone prompt of at least `least` that no graph holds."""
        chunks = [each for each in self._graphs or () if each.phase == Phase.CHUNK.value]
        longest = max((each.tokens for each in chunks), default=0)
        return max(least, self._prefill_from, longest + 1)

    def _chunk(self, tokens: int, prompt: int, halves: int | None = None) -> Amounts:
        """`halves`: as `Halves` has them, where it is not the layout's own."""
        work = self.work
        rows = -(-tokens // work.layout.prefill)
        flops = work.costs.prefill_attention_flops(prompt)
        before = max(prompt - tokens, 0) // 2
        replayed = self._replayed(self._chunk_phase, tokens, 1)
        launches, gain = self._launched(tokens, replayed, halves)
        return Amounts(
            rows,
            2.0 * rows * (work.dense + work.routed),
            rows / prompt * self._shared(flops),
            self._weights(self._met(rows, tokens * prompt_domains(work.layout))),
            self._sent(Sent(rows, 1, new=tokens, before=before, eager=not replayed)),
            self._kernels,
            launches,
            gain,
        )

    def segment(self, segment: Segment) -> Amounts:
        """The work of one segment of a step plan; padding counts as rows without context."""
        if segment.phase is Phase.CHUNK:
            return self._of_prompts._segment(segment.ranks)
        return self._segment(segment.ranks)

    def _segment(self, ranks: Sequence[RankTokens]) -> Amounts:
        everyone = sum(rank.tokens + rank.padding for rank in ranks)
        # Ranks that share rows share what all domains have to compute.
        groups = [ranks] if self.work.layout.prefill > 1 else [[rank] for rank in ranks]
        found = [
            self.runs(
                [(run.start, len(run.tokens)) for rank in group for run in rank.runs],
                scored=sum(run.logits for rank in group for run in rank.runs),
                everyone=everyone,
                padding=sum(rank.padding for rank in group),
            )
            for group in groups
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
        held = -(-tokens // work.layout.prefill)
        attention, cached, rows, short, ends = 0.0, 0.0, 0, 0, 0
        new, before = 0, 0
        for start, count in runs:
            if count > SHORT:
                earlier = work.costs.prefill_attention_flops(start) if start else (0.0, 0.0)
                whole = work.costs.prefill_attention_flops(start + count)
                attention += self._shared((whole[0] - earlier[0], whole[1] - earlier[1]))
                new, before = new + count, before + start
            else:
                rows, short, ends = rows + count, short + 1, ends + start + count
        if short:
            # Their contexts lie close together in what they cost: the mean stands for each.
            mean = ends // short
            attention += rows * self._decoding(mean)
            cached = short * self._cached(mean)
        phase = Phase.MIXED if short else self._chunk_phase
        if not new:
            phase = Phase.DECODE if rows == short else Phase.VERIFY
        replayed = self._replayed(phase, tokens, len(runs))
        launches, gain = self._launched(tokens if new else 0, replayed)
        return Amounts(
            held,
            2.0 * (held * (work.dense + work.routed) + scored * work.head),
            attention / work.layout.prefill,
            self._weights(self._met(held, everyone or tokens)) + cached,
            self._sent(Sent(held, max(scored, 1), new, before, rows, eager=not replayed)),
            self._kernels,
            launches,
            gain,
        )

    def _launched(
        self, prompts: int, replayed: bool, halves: int | None = None
    ) -> tuple[float, float]:
        """Launches of a step with so many tokens of prompts, 0 for none, and what halves in turns
        gain. `halves`: as `Halves` has them, where it is not the layout's own."""
        if replayed:
            return 0.0, 1.0
        if not prompts:
            return self._kernels, 1.0
        once, least = self._kernels + sharing(self.work), self._halves.least
        if not 0 < (least if halves is None else halves) <= prompts:
            return once, 1.0
        return 2 * once, self._halves.gain(prompts)

    @property
    def _kernels(self) -> float:
        return self.work.layers * self.work.costs.layer_launches

    @property
    def _chunk_phase(self) -> Phase:
        """What a chunk of this layout is called: beside a layout of prompts a mixed step."""
        return Phase.CHUNK if self.prompts is None else Phase.MIXED

    def _replayed(self, phase: Phase, tokens: int, runs: int) -> bool:
        """Whether a graph holds the step. More sequences than are planned would have one too."""
        short = phase in (Phase.DECODE, Phase.VERIFY)
        if short or self._graphs is None:
            captured = None if self._graphs is None else {each.phase for each in self._graphs}
            return short and (captured is None or phase.value in captured)
        return any(
            each.phase == phase.value and each.tokens >= tokens and each.runs >= runs
            for each in self._graphs
        )

    def _shared(self, flops: tuple[float, float]) -> float:
        """FLOPs by heads, which tensor ranks share, and those that each of them does."""
        return flops[0] / self.work.layout.tensor + flops[1]

    def _decoding(self, context: int) -> float:
        """FLOPs of one token; keys that all ranks would score are scored where they are held."""
        heads, keys = self.work.costs.decode_attention_flops(context)
        return self._shared((heads, keys / self.work.layout.shards))

    def _cached(self, context: int) -> float:
        """Bytes that a token reads on one rank: its part of what is dealt, all of the rest."""
        work, shards = self.work, self.work.layout.shards
        if shards == 1 or not work.specs:
            return work.costs.cache_reads(work.specs, context) / shards
        dealt = [spec for spec in work.specs if spec.kind is GroupKind.PAGED and spec.deals]
        rest = [spec for spec in work.specs if spec not in dealt]
        reads = work.costs.cache_reads
        return reads(dealt, context) / shards + reads(rest, context)

    def _met(self, tokens: int, everyone: int) -> int:
        """Tokens that the experts of one rank choose from."""
        domains = max(1, self.work.layout.expert // self.work.layout.tensor)
        return min(everyone, tokens * domains)

    def _weights(self, tokens: int) -> float:
        work = self.work
        share = work.costs.distinct_experts(tokens) / work.experts
        return work.dense_bytes + share * work.expert_bytes

    def _sent(self, sent: Sent) -> float:
        return 0.0 if self._exchange is None else self._exchange.seconds(sent)


def step_cost(
    counted: Census,
    held: Held,
    facts: Facts,
    dtype: str,
    tree: Topology | None = None,
    *,
    replayed: Sequence[StepGraph] | None = None,
    halves: Halves = WHOLE,
    rounded_from: int = 0,
) -> StepCost | None:
    """Steps of a layout on a machine; None where the family has no cost model.

    `tree`: the links, where they are not those of the machine that computes. `replayed`: of the
    steps that `held` has room for, those that graphs hold (`graphs.replayed`); None: all of them.
    `halves`: as `StepCost` has it. `rounded_from`: as `RankWork`.
    """
    costs = counted.arch.costs()
    if costs is None:
        return None
    # Processes of one host meet in its memory: no bus, and nothing that has a price yet.
    if talks(held.layout) and tree is None and facts.device.kind != CPU:
        tree = from_facts(facts)
    graphs, prompts = held.wanted if replayed is None else replayed, None
    if held.layout.prefill > 1:
        work = rank_work(counted, held, costs, dtype, prompts=True, rounded_from=rounded_from)
        prompts = StepCost(work, tree, graphs=(), halves=halves)
    work = rank_work(counted, held, costs, dtype, rounded_from=rounded_from)
    alone = halves if prompts is None else WHOLE
    return StepCost(work, tree, prompts, graphs, held.prefill_from, alone)
