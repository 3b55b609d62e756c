"""Ranks act as one device: their answers are joined, and a difference ends the engine."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from metainfer.core.errors import InternalError
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase, RankTokens, RunResult, Segment, StepPlan, TokenRun
from metainfer.executor.ranks import RankExecutor

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
            answers.append((hashlib.sha256(body).hexdigest()[:16], b"" if rank % 2 else body))
        return answers

    def close(self, grace_s: float = 0.0) -> None:
        self.calls.append(("close", ()))


def test_each_domain_answers_once_in_the_plan_s_slots() -> None:
    group = Group((10, 10, 20, 20))
    result = RankExecutor(group, LAYOUT, slots=3).execute(PLAN)
    assert [(run.slot, run.tokens) for run in result.runs] == [(1, (10,)), (4, (20,))]
    assert result.step == 3 and result.rank_digest
    ((method, (sent,)),) = group.calls
    assert method == "execute" and msgspec.msgpack.decode(sent, type=StepPlan) == PLAN
    other = RankExecutor(Group((10, 10, 21, 21)), LAYOUT, slots=3).execute(PLAN)
    assert other.rank_digest != result.rank_digest


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
