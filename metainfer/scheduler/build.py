"""A step plan under construction, and what is remembered until its result returns."""

from __future__ import annotations

from metainfer.core.step import (
    NewRequest,
    PageGrant,
    Phase,
    RankTokens,
    Segment,
    StateMove,
    StepPlan,
    TokenRun,
)
from metainfer.scheduler.config import SchedulerConfig
from metainfer.scheduler.sequence import Sequence

Entry = tuple[Sequence, TokenRun]
"""A run under way, and whose it is."""


class Flight:
    """One submitted step: its runs in the order of the plan, which the result repeats.

    `decoding`, `aimed`: sequences that decoded, and the drafts that were asked for; `drafting_s`:
    what proposing them took on the host.
    """

    __slots__ = ("aimed", "decoding", "drafting_s", "entries", "step")

    def __init__(self, step: int, entries: list[Entry]) -> None:
        self.step = step
        self.entries = entries
        self.decoding = self.aimed = 0
        self.drafting_s = 0.0


class Build:
    """Collects one plan. What does not depend on a run (`released`) waits for the next plan."""

    def __init__(self, domains: int) -> None:
        self.new: list[NewRequest] = []
        self.pages: list[PageGrant] = []
        self.moves: list[StateMove] = []
        self.released: list[int] = []
        self.short: list[list[Entry]] = [[] for _ in range(domains)]  # decode and verify runs
        self.chunks: list[list[Entry]] = [[] for _ in range(domains)]

    def withdraw(self, slot: int) -> bool:
        """Undo an admission of this very step; False when the slot entered in an earlier one."""
        if all(entry.slot != slot for entry in self.new):
            return False
        self.new = [entry for entry in self.new if entry.slot != slot]
        self.pages = [grant for grant in self.pages if grant.slot != slot]
        self.moves = [move for move in self.moves if move.slot != slot]
        return True

    def finish(self, step: int, config: SchedulerConfig) -> tuple[StepPlan, Flight] | None:
        """The plan, or None when no run was planned; then everything waits for the next step."""
        chunked, short = any(self.chunks), any(self.short)
        if not chunked and not short:
            return None
        lists: list[tuple[Phase, list[list[Entry]]]] = []
        splits = config.split_phases and _prompt_tokens(self.chunks) >= config.prefill_from
        if short and (splits or not chunked):
            lists.append((_short_phase(self.short), self.short))
        if chunked and (splits or not (short or config.split_phases)):
            lists.append((Phase.CHUNK, self.chunks))
        if not lists:
            both = [a + b for a, b in zip(self.short, self.chunks, strict=True)]
            lists.append((Phase.MIXED, both))
        plan = StepPlan(
            step,
            tuple(_segment(phase, ranks, config) for phase, ranks in lists),
            tuple(self.new),
            tuple(self.pages),
            (),
            tuple(self.moves),
            tuple(self.released),
        )
        return plan, Flight(step, [entry for _, ranks in lists for rank in ranks for entry in rank])


def _short_phase(ranks: list[list[Entry]]) -> Phase:
    drafted = any(run.drafts for rank in ranks for _, run in rank)
    return Phase.VERIFY if drafted else Phase.DECODE


def _prompt_tokens(ranks: list[list[Entry]]) -> int:
    return sum(len(run.tokens) for rank in ranks for _, run in rank)


def _segment(phase: Phase, ranks: list[list[Entry]], config: SchedulerConfig) -> Segment:
    """One launch. Every domain runs it: an idle one computes at least one dummy token."""
    runs = [tuple([run for _, run in rank]) for rank in ranks]
    counts = [len(rank) for rank in runs]
    drafts = 0
    uniform = True
    if phase is not Phase.DECODE:
        counts = [sum(len(run.tokens) for run in rank) for rank in runs]
        drafts = max((run.drafts for rank in runs for run in rank), default=0)
        uniform = phase is not Phase.VERIFY or all(
            run.drafts == drafts for rank in runs for run in rank
        )
    bucket = config.bucket(phase, max(counts)) if uniform and config.buckets else 0
    tokens = tuple(
        RankTokens(rank, bucket - count if bucket else int(not count))
        for rank, count in zip(runs, counts, strict=True)
    )
    return Segment(phase, config.layouts.get(phase, "default"), tokens, bucket, drafts)
