"""Ranks act as one device: their answers are joined, and a difference ends the engine."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from metainfer.core.errors import InternalError
from metainfer.core.plan import LayoutPlan, StepGraph
from metainfer.core.request import GrammarSpec, SamplingParams
from metainfer.core.step import (
    NewRequest,
    Phase,
    RankTokens,
    RunResult,
    Segment,
    StepPlan,
    TokenRun,
)
from metainfer.executor.late import DRAFTS, OP_BY_OP
from metainfer.executor.local import LocalExecutor
from metainfer.executor.protocol import OneDevice, ServingExecutor
from metainfer.executor.ranks import RankExecutor
from metainfer.executor.slots import GRAMMAR, HISTORY

LAYOUT = LayoutPlan(name="2xtp2", tensor=2, data=2)
PLAN = StepPlan(
    3,
    (
        Segment(
            Phase.DECODE,
            "2xtp2",
            (RankTokens((TokenRun(1, 0, (5,)),)), RankTokens((TokenRun(4, 0, (6,)),))),
        ),
    ),
)


class Group:
    """Four ranks, two a domain; `tokens`: what each draws."""

    def __init__(self, tokens: tuple[int, ...], slots: tuple[int, ...] = (1, 1, 1, 1)) -> None:
        self._tokens, self._slots = tokens, slots
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def call(self, method: str, *arguments: object) -> list[Any]:
        self.calls.append((method, arguments))
        answers = []
        for rank, (token, slot) in enumerate(zip(self._tokens, self._slots, strict=True)):
            body = msgspec.msgpack.encode((RunResult(slot, (token,)),))
            digest = hashlib.sha256(body).hexdigest()[:16]
            answers.append((digest, b"" if rank % 2 else body, 0.5 + rank, {"likeliest": 1 + rank}))
        return answers

    def post(self, method: str, *arguments: object) -> None:
        self.calls.append((method, arguments))

    def close(self, grace_s: float = 0.0) -> None:
        self.calls.append(("close", ()))


def test_each_domain_answers_once_in_the_plan_s_slots() -> None:
    group = Group((10, 10, 20, 20))
    result = RankExecutor(group, LAYOUT, slots=3).execute(PLAN)
    assert [(run.slot, run.tokens) for run in result.runs] == [(1, (10,)), (4, (20,))]
    assert result.step == 3 and result.rank_digest and result.seconds == 3.5  # the slowest's
    (method, (sent,)), then = group.calls
    assert method == "submit" and msgspec.msgpack.decode(sent, type=StepPlan) == PLAN
    assert then == ("collect", ())
    executor = RankExecutor(group, LAYOUT, slots=3)
    assert executor.draws == {}
    for _ in range(2):
        executor.execute(PLAN)
        assert executor.draws == {"likeliest": 1 + 3}  # of who leads, not added up over steps
    other = RankExecutor(Group((10, 10, 21, 21)), LAYOUT, slots=3).execute(PLAN)
    assert other.rank_digest != result.rank_digest


def test_a_group_is_no_device_that_decides_for_itself() -> None:
    """Else an engine would compute a run again, or free memory, on one rank alone."""
    serving: ServingExecutor = RankExecutor(Group((10, 10, 20, 20)), LAYOUT, slots=3)
    assert not isinstance(serving, OneDevice)
    assert {"locate", "free_memory", "eager"} <= set(vars(LocalExecutor))


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ((10, 11, 20, 20), "ranks 0 and 1 drew different tokens in step 3"),
        ((10, 10, 20, 22), "ranks 2 and 3 drew different tokens in step 3"),
    ],
)
def test_ranks_of_a_domain_that_draw_otherwise_end_the_engine(
    tokens: tuple[int, ...], told: str
) -> None:
    executor = RankExecutor(Group(tokens), LAYOUT, slots=3)
    with pytest.raises(InternalError, match=told):
        executor.execute(PLAN)


def test_an_answer_for_another_slot_ends_the_engine() -> None:
    executor = RankExecutor(Group((10, 10, 20, 20), (1, 1, 2, 2)), LAYOUT, slots=3)
    with pytest.raises(InternalError, match="step 3: domain 1 did not answer slot 4"):
        executor.execute(PLAN)


def test_three_open_plans_are_refused_and_results_come_in_order() -> None:
    executor = RankExecutor(Group((10, 10, 20, 20)), LAYOUT, slots=3)
    executor.submit(PLAN)
    executor.submit(msgspec.structs.replace(PLAN, step=4))
    with pytest.raises(InternalError, match="three plans are open"):
        executor.submit(PLAN)
    assert [executor.collect().step, executor.collect().step] == [3, 4]


# -- launched behind an unread step ----------------------------------------------------------------

DECODES = (StepGraph(phase="decode", tokens=2, runs=2),)
"""Each domain's largest captured step: two sequences."""


def decoding(*domains: tuple[int, ...], phase: Phase = Phase.DECODE, drafts: int = 0) -> StepPlan:
    """A step in which each domain's slots continue."""
    ranks = tuple(
        RankTokens(tuple(TokenRun(slot, 0, (5,) * (1 + drafts), 1, drafts) for slot in slots))
        for slots in domains
    )
    return StepPlan(4, (Segment(phase, "2xtp2", ranks, drafts=drafts),))


SAMPLING = StepPlan(
    3,
    (
        Segment(
            Phase.DECODE,
            "2xtp2",
            (RankTokens((TokenRun(1, 0, (5,), 1, 0, True),)), RankTokens((TokenRun(4, 0, (6,)),))),
        ),
    ),
)
"""Slot 1 draws."""

WIDE = StepPlan(
    4,
    (
        Segment(
            Phase.DECODE,
            "2xtp2",
            (RankTokens((TokenRun(1, 0, (5,)),)), RankTokens((TokenRun(4, 0, (6, 6, 6)),))),
        ),
    ),
)


def behind(plan: StepPlan, *, first: StepPlan = PLAN, params: SamplingParams | None = None) -> str:
    """Why `plan` waits for `first`, which gives slots 1 and 2 to requests with `params`."""
    executor = RankExecutor(Group((10, 10, 20, 20)), LAYOUT, 3, DECODES)
    params = params or SamplingParams()
    new = tuple(NewRequest("r", slot, 0, (5,), 1, 0, params) for slot in (1, 2))
    executor.submit(msgspec.structs.replace(first, new=new))
    return executor.waits_for(plan)


def test_a_captured_step_follows_one_that_nobody_has_read() -> None:
    group = Group((10, 10, 20, 20))
    executor = RankExecutor(group, LAYOUT, 3, DECODES)
    assert not executor.unread
    executor.submit(PLAN)
    assert executor.unread and executor.waits_for(decoding((1, 2), (4,))) == ""
    executor.submit(decoding((1, 2), (4,)))
    assert [method for method, _ in group.calls] == ["submit", "submit"]  # nothing was read
    assert executor.collect().step == 3 and executor.unread


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (decoding((0, 1, 2), ()), OP_BY_OP),  # more than a domain captured, however many in all
        (decoding((1,), (4,), phase=Phase.CHUNK), OP_BY_OP),
        (WIDE, OP_BY_OP),  # and however many in the first
        (decoding((1,), (4,), drafts=1), DRAFTS),
    ],
)
def test_what_a_domain_did_not_capture_or_drafts_is_read_at_once(plan: StepPlan, why: str) -> None:
    assert behind(plan) == why
    executor = RankExecutor(Group((10, 10, 20, 20)), LAYOUT, 3, DECODES)
    executor.submit(plan)
    assert not executor.unread and executor.waits_for(PLAN) == ""


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (SamplingParams(frequency_penalty=0.5), HISTORY),
        (SamplingParams(grammar=GrammarSpec("regex", "a+")), GRAMMAR),
        (SamplingParams(temperature=0.7, seed=3), ""),
    ],
)
def test_draws_that_ask_for_tokens_wait_for_them(params: SamplingParams, why: str) -> None:
    assert behind(decoding((1,), (4,)), first=SAMPLING, params=params) == why
    assert behind(decoding((2,), (4,)), first=SAMPLING, params=params) == ""  # nothing drawn yet
    executor = RankExecutor(Group((10, 10, 20, 20)), LAYOUT, 3, DECODES)
    new = NewRequest("r", 1, 0, (5,), 1, 0, params)
    executor.submit(msgspec.structs.replace(SAMPLING, new=(new,)))
    executor.submit(msgspec.structs.replace(decoding((2,), (4,)), released=(1,)))
    assert executor.waits_for(decoding((1,), (4,))) == ""  # the slot is another's


def test_what_ranks_say_at_their_start_is_told_once() -> None:
    class Slow(Group):
        def call(self, method: str, *arguments: object) -> list[Any]:
            assert method == "warm"
            return [
                ["long sums are slow: no C compiler"],
                [],
                None,
                ["long sums are slow: no C compiler"],
            ]

    told: list[str] = []
    RankExecutor(Slow((1, 1, 1, 1)), LAYOUT, slots=3).warm(told.append)
    assert told == ["4 ranks", "long sums are slow: no C compiler"]
