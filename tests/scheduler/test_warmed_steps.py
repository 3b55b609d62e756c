"""B-30: no step that the scheduler builds is larger than one that ran before ready."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import example, given, settings
from hypothesis import strategies as st
from null_world import VOCAB, request, world_of

from metainfer.core.step import Phase, StepPlan
from metainfer.executor.warmup import WarmUp, most_mixed
from metainfer.scheduler.config import DraftSource


class Ones(DraftSource):
    """As many drafts as may be."""

    def propose(self, request: object, tokens: object, limit: int) -> list[int]:
        return [1] * limit

    def forget(self, request_id: str) -> None:
        pass


def sizes(plan: StepPlan) -> Iterator[tuple[Phase, int, int]]:
    """Phase, tokens and runs of what the one domain computes."""
    for segment in plan.segments:
        (rank,) = segment.ranks
        yield segment.phase, rank.tokens, len(rank.runs)


def warmed(
    border: int | None, *, step: int, context: int, slots: int, drafts: int
) -> tuple[WarmUp, int | None]:
    """What runs before ready. `border`: prompt tokens from which on a step is split; 0: always,
    None: never."""
    mixed = 0 if border == 0 else step
    if border:
        mixed = most_mixed(border, slots, drafts, step)
    warm = WarmUp(
        step_tokens=step,
        max_context=context,
        slots=slots,
        drafts=drafts,
        mixed_tokens=mixed,
        cpu=False,
    )
    return warm, border


@st.composite
def limits(draw: st.DrawFn) -> tuple[WarmUp, int | None]:
    slots = draw(st.integers(1, 6))
    step = draw(st.integers(slots, 80))
    return warmed(
        draw(st.sampled_from((None, 0, draw(st.integers(2, step + 9))))),
        step=step,
        context=draw(st.integers(4, 60)),
        slots=slots,
        drafts=draw(st.sampled_from((0, 0, 3))),
    )


@given(limits())
def test_b30_what_runs_before_ready_keeps_the_limits(found: tuple[WarmUp, int | None]) -> None:
    warm, _ = found
    steps = [(phase, runs) for phase, runs, _ in warm.before()] + list(warm.largest())
    for _, runs in steps:
        assert 0 < len(runs) <= warm.slots
        assert sum(length for _, length in runs) <= warm.step_tokens
        assert all(start >= 0 and length > 0 for start, length in runs)
        assert all(start + length <= warm.max_context for start, length in runs)
    phase, runs = steps[-1]
    assert phase is Phase.CHUNK
    assert sum(length for _, length in runs) == min(warm.step_tokens, warm.slots * warm.max_context)


@settings(max_examples=50)
@given(limits(), st.integers(0, 10**6))
@example(warmed(6, step=80, context=50, slots=6, drafts=3), 3)  # decodes there bring their drafts
def test_b30_no_step_is_larger_than_what_ran_before_ready(
    found: tuple[WarmUp, int | None], seed: int
) -> None:
    warm, border = found
    rng = random.Random(seed)
    world = world_of(
        "dense",
        pages=1 + warm.slots * -(-warm.max_context // 8),
        slots=warm.slots,
        max_context=warm.max_context,
        step_tokens=warm.step_tokens,
        mixed_prefill_tokens=rng.randrange(1, warm.step_tokens + 1),
        max_drafts=warm.drafts,
        split_phases=border is not None,
        prefill_from=border or 0,
        drafts=Ones() if warm.drafts else None,
    )
    for number in range(rng.randrange(1, 12)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, warm.max_context))]
        world.add(request(f"r{number}", prompt, rng.randrange(1, 9)))
        if rng.random() < 0.3:
            world.step()
    world.run()
    tokens: dict[Phase, int] = {}
    runs: dict[Phase, int] = {}
    for phase, listed in warm.largest():
        tokens[phase] = max(tokens.get(phase, 0), sum(length for _, length in listed))
        runs[phase] = max(runs.get(phase, 0), len(listed))
    for plan in world.plans:
        for phase, count, requests in sizes(plan):
            assert count <= tokens[phase] and requests <= runs[phase], phase
