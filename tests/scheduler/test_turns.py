"""The engine's turns over a device that reads late, and at times fails: the same answers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from null_world import SHAPES, VOCAB, World, request, world_of

from metainfer.core.errors import InternalError
from metainfer.core.request import FinishReason
from metainfer.core.step import NON_FINITE, RunResult, StepPlan, StepResult
from metainfer.engine.protocol import Fault
from metainfer.engine.recorder import FlightRecorder, in_flight, read
from metainfer.engine.stacks import StackTimer
from metainfer.engine.steps import Steps
from metainfer.executor.protocol import NanGuard


class LateDevice:
    """The null device of a world. `lacks(plan)`: memory does not suffice for it; `slow(plan)`: it
    is still under way when `submit` returns; `waits(plan)`: what is under way is read before."""

    def __init__(
        self,
        world: World,
        lacks: Callable[[StepPlan], bool],
        slow: Callable[[StepPlan], bool],
        waits: Callable[[StepPlan], bool] = lambda plan: False,
    ) -> None:
        self._device, self._lacks, self._slow, self._waits = world.device, lacks, slow, waits
        self.unread = False
        self.deepest = 0

    def submit(self, plan: StepPlan) -> None:
        # A device takes in the plan's diff before it allocates anything.
        diff = StepPlan(plan.step, (), plan.new, plan.pages, released=plan.released)
        self._device._execute(diff)
        if self._lacks(plan):
            raise MemoryError
        self._device.submit(StepPlan(plan.step, plan.segments, (), (), plan.copies, plan.moves))
        self.deepest = max(self.deepest, len(self._device._open))
        self.unread = self._slow(plan)

    def waits_for(self, plan: StepPlan) -> str:
        return "history" if self._waits(plan) else ""

    def collect(self) -> StepResult:
        return self._device.collect()

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    def close(self) -> None:
        self._device.close()

    # What it decides for itself, as one device may.

    nan_guard, emulated = NanGuard.LOGITS, None

    def free_memory(self) -> int:
        return 1 << 20

    def locate(self, plan: StepPlan, slot: int) -> None:
        pytest.fail("it was looked for")

    def eager(self) -> AbstractContextManager[None]:
        return nullcontext()


def turns(world: World, device: LateDevice) -> tuple[Steps, FlightRecorder, list[Fault]]:
    recorder, faults = FlightRecorder(), list[Fault]()
    # Everything is put back at once, drafts or not: that drafts give way first is not the question.
    world._no_draft_holds_a_page = lambda domain, victim: None  # type: ignore[method-assign]
    steps = Steps(device, world.scheduler, recorder, StackTimer(), faults.append, ahead=device)
    return steps, recorder, faults


def run(world: World, steps: Steps, limit: int = 4000) -> None:
    for _ in range(limit):
        if not world.scheduler.has_work:
            return
        for output in steps.turn()[1]:
            world._take(output)
        world.scheduler.audit()
    raise InternalError(f"not finished after {limit} turns")


@settings(max_examples=int(os.environ.get("WORKLOADS", "25")))
@example("dense", 24, 1, 0.1)  # a trial whose steps may not be launched ahead
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 10**6),
    domains=st.integers(1, 2),
    short=st.sampled_from([0.0, 0.1]),
)
def test_turns_ahead_change_no_answer(shape: str, seed: int, domains: int, short: float) -> None:
    """Arrivals and cancels between turns, ends found late, steps that fail behind others."""
    rng = random.Random(seed)
    world = world_of(shape, slots=3, pages=rng.choice((30, 60)), domains=domains)
    device = LateDevice(
        world,
        lambda plan: (
            sum(len(r.runs) for s in plan.segments for r in s.ranks) > 1 and rng.random() < short
        ),
        lambda plan: rng.random() < 0.8,
        lambda plan: rng.random() < 0.2,
    )
    steps, recorder, faults = turns(world, device)
    stem = [rng.randrange(VOCAB) for _ in range(20)]
    for number in range(rng.randrange(2, 8)):
        prompt = [*stem[: rng.randrange(20)], *(rng.randrange(VOCAB) for _ in range(3))]
        ends = tuple(rng.sample(range(VOCAB), 3))
        world.add(request(f"r{number}", prompt, rng.randrange(1, 20), eos_token_ids=ends))
        for _ in range(rng.randrange(4)):
            for output in steps.turn()[1]:
                world._take(output)
        if rng.random() < 0.2:
            world.cancel(f"r{rng.randrange(number + 1)}")
    run(world, steps)
    world.check()
    assert all(answer.finish is not FinishReason.ERROR for answer in world.answers.values())
    assert len(faults) == world.scheduler.counters.abandoned
    assert in_flight(recorder.block) is None
    assert all("outcome" in step for step in read(recorder.block)["steps"])
    for manager in world.kv:
        manager.flush()
    world.scheduler.audit()


def test_the_next_step_is_launched_before_the_latest_is_read() -> None:
    world = world_of(slots=2)
    device = LateDevice(world, lambda plan: False, lambda plan: True)
    steps, recorder, _ = turns(world, device)
    world.add(request("a", [1, 2, 3], 6))
    world.add(request("b", [4, 5], 6))
    collect, looked = device.collect, list[list[int]]()

    def look() -> StepResult:
        busy, result = in_flight(recorder.block), collect()
        assert busy is not None
        looked.append([busy[0], read(recorder.block)["in_flight"]["step"], result.step])
        return result

    device.collect = look  # type: ignore[method-assign]
    plan, outputs = steps.turn()
    assert plan is not None and plan.step == 0 and len(outputs) == 2
    assert world.scheduler.awaiting == 1 and device.deepest == 2
    (flying,) = [step for step in read(recorder.block)["steps"] if "outcome" not in step]
    assert flying["step"] == 1
    for output in outputs:
        world._take(output)
    run(world, steps)
    world.check()
    assert looked == [[step] * 3 for step in range(6)]  # the oldest is what a server looks at
    assert world.scheduler.counters.steps == 6  # ends by length are known before: none is wasted


def test_a_step_that_was_read_at_once_is_followed_only_then() -> None:
    world = world_of(slots=2)
    device = LateDevice(world, lambda plan: False, lambda plan: False)
    steps, _, _ = turns(world, device)
    world.add(request("a", [1, 2, 3], 6))
    run(world, steps)
    assert device.deepest == 1


def test_a_step_that_waits_lets_go_of_the_tokens_ahead_of_it() -> None:
    """A long chunk must not hold back what was drawn before it."""
    world = world_of(slots=2)
    device = LateDevice(world, lambda plan: False, lambda plan: True, lambda plan: plan.step == 2)
    steps, _, _ = turns(world, device)
    world.add(request("a", [1, 2, 3], 6))
    submit, launched = device.submit, list[int]()

    def noted(plan: StepPlan) -> None:
        launched.append(plan.step)
        submit(plan)

    device.submit = noted  # type: ignore[method-assign]
    read_at = []
    while world.scheduler.has_work:
        plan, outputs = steps.turn()
        assert plan is not None
        read_at.append((plan.step, launched[-1]))
        for output in outputs:
            world._take(output)
    world.check()
    assert read_at == [(0, 1), (1, 1), (2, 3), (3, 4), (4, 5), (5, 5)]
    assert steps.waits == {"history": 1} and steps.overlapped == 4


def test_a_step_that_fails_behind_another_costs_that_one_nothing() -> None:
    world = world_of(slots=4)
    failed: list[int] = []

    def lacks(plan: StepPlan) -> bool:
        if world.scheduler.awaiting == 2 and not failed:
            failed.append(plan.step)
        return failed == [plan.step]

    device = LateDevice(world, lacks, lambda plan: True)
    steps, recorder, faults = turns(world, device)
    for number in range(3):
        world.add(request(f"r{number}", [number, 7], 5))
    run(world, steps)
    world.check()
    assert failed == [1] and [fault.kind for fault in faults] == ["out_of_memory"]
    outcomes = {step["step"]: step["outcome"]["error"] for step in read(recorder.block)["steps"]}
    assert outcomes[0] == "" and outcomes[1] == "MemoryError" and set(outcomes.values()) == {
        "", "MemoryError"
    }  # fmt: skip


def test_nan_of_a_request_that_was_put_back_is_not_looked_for_in_its_slot() -> None:
    """The plan behind took the slot: what is there now is another's, or nobody's."""
    world = world_of(slots=2)
    device: Any = LateDevice(world, lambda plan: False, lambda plan: True)
    steps, _, faults = turns(world, device)
    world.add(request("a", [1, 2, 3], 6))
    schedule, collect = world.scheduler.schedule, device.collect

    def taken() -> StepPlan | None:
        plan = schedule()
        return None if plan is None else replace(plan, released=(0,) if plan.step == 1 else ())

    def broken() -> StepResult:
        result = collect()
        runs = tuple(replace(run, tokens=(), error="NaN", code=NON_FINITE) for run in result.runs)
        return replace(result, runs=runs)

    device.submit, device.collect = world.device.submit, broken
    device.unread = True
    world.scheduler.schedule = taken  # type: ignore[method-assign]
    world.device._execute = lambda plan: StepResult(  # type: ignore[method-assign]
        plan.step, tuple(RunResult(run.slot) for run in plan.segments[0].ranks[0].runs)
    )
    steps.turn()
    assert [fault.text.partition(": ")[2] for fault in faults] == [
        "the request was put back meanwhile"
    ]
