"""Ranks that launch a step behind one that nobody has read: the answers of ranks read at once, and
no step waits that one process would have launched.

One rank in this process, with recorded steps (see `test_overlap`); every plan crosses as bytes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import save_tiny, start
from statics import again, executor_of, overlap_steps
from test_overlap import SHAPES, play, requests_of

from metainfer.core.plan import LayoutPlan
from metainfer.core.step import StepPlan
from metainfer.executor.ranks import RankExecutor, RankSide
from metainfer.workers.group import InprocGroup

SCHEDULES = int(os.environ.get("SCHEDULES", "1"))


@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_ranks_read_late_change_no_answer(
    tmp_path: Path, schedule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", tmp_path, 5, vocab_size=256)
    engine = start(tmp_path, dtype="float64", context=96, concurrency=8, chunk_tokens=28)
    wanted = play(engine, requests_of(schedule, "now"))
    overlap_steps(engine, SHAPES, again)
    assert engine.resolved is not None
    side = RankSide(executor_of(engine), 0, engine.resolved.sizes.slots, leads=True, level=False)
    layout = LayoutPlan(name="single", tensor=1, data=1)
    ranks = RankExecutor(InprocGroup([side]), layout, engine.resolved.sizes.slots, SHAPES)
    one, waits_for = executor_of(engine), ranks.waits_for

    def as_one_process(plan: StepPlan) -> str:
        assert waits_for(plan) == one.waits_for(plan)
        return waits_for(plan)

    monkeypatch.setattr(ranks, "waits_for", as_one_process)
    assert one._static is not None
    one._static.draws["likeliest"] = 3  # no sampler of a CPU is captured: none is counted
    steps = engine._steps
    assert steps is not None
    steps._executor = steps._ahead = ranks
    found = play(engine, requests_of(schedule, "late"))
    for answer, other in zip(wanted, found, strict=True):
        assert answer.tokens == other.tokens and answer.finish == other.finish
    assert steps.overlapped and steps.waits
    assert ranks.draws == one.draws == {"likeliest": 3}
