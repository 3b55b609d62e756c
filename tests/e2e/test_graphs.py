"""Captured steps of dense models against their ops: buckets, padding, stale entries, silent rows.

Without a card a replay runs the step's Python again on the bucket's buffers, since the dense ops
of a CPU ask the host; on a card (``-m gpu``) the real graphs are judged. DeepSeek-V4's steps are
really recorded (`test_v4_graphs`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from harness import ask, start
from statics import Logits, again, capture_steps, decode, executor_of, release_steps

from metainfer.core.plan import StepGraph
from metainfer.core.request import SamplingParams
from metainfer.core.step import (
    NewRequest,
    PageGrant,
    Phase,
    RankTokens,
    Segment,
    StepPlan,
    TokenRun,
)
from metainfer.engine.engine import Engine
from metainfer.executor.local import LocalExecutor

SHAPES = (
    StepGraph(phase="mixed", tokens=34, runs=6),
    StepGraph(phase="chunk", tokens=32, runs=3),
    StepGraph(phase="chunk", tokens=8, runs=3),
    *decode(4, 2, 1),
)


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-mistral"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = start(
        f"random:{request.param}",
        dtype="float64",
        allow_fallback=("all",),
        context=200,
        concurrency=6,
        chunk_tokens=32,
        prefix_cache=False,
    )
    yield made
    made.close()


def test_replays_give_the_bits_of_their_ops(engine: Engine, rng: random.Random) -> None:
    """Batches above, at and below the buckets; contexts that shrink leave stale entries behind."""
    prompts = [[rng.randrange(3, 300) for _ in range(n)] for n in (120, 3, 60, 1, 33, 9)]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=9 + 3 * i, logprobs=1)
        for i, t in enumerate((0.0, 0.8, 0.0, 0.9, 0.0, 0.7))
    ]

    def run() -> tuple[list[list[int]], list[torch.Tensor]]:
        with Logits(engine) as seen:
            found = ask(engine, prompts, params) + ask(engine, prompts[1:3], params[1:3])
        return [answer.tokens for answer in found], seen.rows

    plain, _ = run()  # on shapes of their own: other sums, the same answers in float64
    steps = capture_steps(executor_of(engine), SHAPES, again)
    try:
        with executor_of(engine).eager():
            eager, rows = run()
        assert not steps.replays
        replayed, others = run()
    finally:
        release_steps(executor_of(engine))
    assert plain == eager == replayed
    assert len(rows) == len(others)
    assert all(torch.equal(a, b) for a, b in zip(rows, others, strict=True))
    assert set(steps.replays) == {Phase.DECODE, Phase.CHUNK, Phase.MIXED}
    assert any(len(row) > 4 for row in rows)  # and some stand beyond every bucket


def test_a_graph_step_with_a_row_that_samples_nothing(engine: Engine) -> None:
    """A prompt's chunk of one token may stand among decodes; it takes no row of the logits."""
    executor = LocalExecutor(executor_of(engine)._parts)
    groups = executor._parts.groups
    params = SamplingParams(temperature=0.0)

    def step() -> list[tuple[int, ...]]:
        new = tuple(
            NewRequest(f"n{slot}", slot, 0, prompt, len(prompt), 0, params)
            for slot, prompt in enumerate(((7, 8), (9,), (30,)))
        )
        grants = tuple(
            PageGrant(slot, group.index, 0, (slot + 1,)) for slot in range(3) for group in groups
        )
        runs = (
            TokenRun(0, 0, (7,), 0, 0, False),
            TokenRun(1, 0, (9,), 1, 0, True),
            TokenRun(2, 0, (30,), 1, 0, True),
        )
        segment = Segment(Phase.DECODE, "single", (RankTokens(runs),))
        result = executor.execute(StepPlan(0, (segment,), new, grants))
        executor._slots.apply(StepPlan(1, (), released=(0, 1, 2)))
        return [run.tokens for run in result.runs]

    eager = step()
    steps = capture_steps(executor, decode(4), again)
    assert step() == eager
    assert steps.replays == {Phase.DECODE: 1}
    assert eager[0] == () and len(eager[1]) == len(eager[2]) == 1 and eager[1] != eager[2]


@pytest.mark.gpu
def test_gpu_graphs_against_eager(rng: random.Random) -> None:
    """On a card, bit for bit: the same kernels on the same shapes, replayed or launched."""
    made = start("random:qwen3-8b?layers=2", platform="cuda", context=2048, concurrency=4)
    executor = executor_of(made)
    assert executor._static is not None, "no graph was captured"
    prompts = [[rng.randrange(3, 150000) for _ in range(n)] for n in (700, 3, 129, 64)]
    params = [SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)] * 4
    with Logits(made) as captured:
        found = ask(made, prompts, params)
    with executor.eager(), Logits(made) as eager:
        answers = ask(made, prompts, params)
    assert executor._static.replays[Phase.DECODE] > 30
    assert [answer.tokens for answer in found] == [answer.tokens for answer in answers]
    assert all(torch.equal(a, b) for a, b in zip(captured.rows, eager.rows, strict=True))
    made.close()
