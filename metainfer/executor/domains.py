"""One KV domain's part of a step plan, and the answers of all domains put together again.

The scheduler numbers slots over all domains; an executor of one domain numbers its own from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from metainfer.core.step import Phase, RankTokens, RunResult, Segment, StepPlan


def of_domain(
    plan: StepPlan, domain: int, slots: int, *, level: bool, shared: bool = False
) -> StepPlan:
    """What `domain`, with `slots` slots of its own, has to do.

    `level`: every rank computes as many tokens as the widest, since domains meet in collectives; so
    does a model that drafts behind it.
    `shared`: ranks of all domains share the rows of chunks, whose lists stay whole; slots of other
    domains mean nothing in them.
    """
    first = domain * slots

    def own(slot: int) -> bool:
        return first <= slot < first + slots

    replace = msgspec.structs.replace
    return StepPlan(
        plan.step,
        tuple(
            _numbered(segment, first)
            if shared and segment.phase is Phase.CHUNK
            else _own_segment(segment, domain, first, level)
            for segment in plan.segments
        ),
        tuple(replace(n, slot=n.slot - first, domain=0) for n in plan.new if own(n.slot)),
        tuple(replace(p, slot=p.slot - first) for p in plan.pages if own(p.slot)),
        tuple(replace(c, domain=0) for c in plan.copies if c.domain == domain),
        tuple(
            replace(move, slot=move.slot - first, domain=0)
            for move in plan.moves
            if move.domain == domain
        ),
        tuple(slot - first for slot in plan.released if own(slot)),
    )


def _own_segment(segment: Segment, domain: int, first: int, level: bool) -> Segment:
    mine = segment.ranks[domain]
    padding, drafting = mine.padding, mine.drafting
    if level:
        padding = max(rank.tokens + rank.padding for rank in segment.ranks) - mine.tokens
        drafting = drafting_rows(segment.ranks)
    own = _numbered(segment, first).ranks[domain]
    return msgspec.structs.replace(segment, ranks=(RankTokens(own.runs, padding, drafting),))


def drafting_rows(ranks: Sequence[RankTokens]) -> tuple[int, ...]:
    """Rows of each step of a model that drafts behind its first guess, as the domain with the most
    has them. A run that asks for n proposals takes n - 1 of these steps."""
    deepest = max((run.proposals for rank in ranks for run in rank.runs), default=0)
    return tuple(
        max(sum(run.proposals > ahead for run in rank.runs) for rank in ranks)
        for ahead in range(1, deepest)
    )


def _numbered(segment: Segment, first: int) -> Segment:
    """Slots numbered from `first` on."""
    replace = msgspec.structs.replace
    ranks = tuple(
        replace(rank, runs=tuple(replace(run, slot=run.slot - first) for run in rank.runs))
        for rank in segment.ranks
    )
    return replace(segment, ranks=ranks)


def joined(
    plan: StepPlan, answers: Sequence[Iterable[RunResult]], slots: int
) -> tuple[RunResult, ...]:
    """The runs' results in the order segments, ranks, runs; `answers`: each domain's, in its order.

    Raises:
        ValueError: a domain answered more or fewer runs than it was given.
    """
    waiting: list[Iterator[RunResult]] = [iter(answer) for answer in answers]
    found = []
    for segment in plan.segments:
        for domain, rank in enumerate(segment.ranks):
            for run in rank.runs:
                result = next(waiting[domain], None)
                if result is None or result.slot + domain * slots != run.slot:
                    raise ValueError(f"domain {domain} did not answer slot {run.slot}")
                found.append(msgspec.structs.replace(result, slot=run.slot))
    left = [domain for domain, answer in enumerate(waiting) if next(answer, None) is not None]
    if left:
        raise ValueError(f"domain {left[0]} answered more runs than it was given")
    return tuple(found)
