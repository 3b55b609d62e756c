"""B-30: what a first request asks for is launched before an engine is ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from metainfer.core.intent import Intent
from metainfer.core.plan import StepGraph
from metainfer.core.request import SamplingParams
from metainfer.core.step import Phase
from metainfer.engine.engine import Engine
from metainfer.executor.graphs import StaticSteps
from metainfer.executor.local import LocalExecutor
from metainfer.executor.static import DeviceTables
from metainfer.executor.warmup import GREEDY, SIZES


def test_b30_warm_up_on_a_card_draws_and_meets_the_forms_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("metainfer.executor.warmup.WIDENS_FROM", 100)
    engine = Engine(Intent(model="random:tiny-llama", platform="cpu", context=512, concurrency=2))
    engine.start()
    executor: Any = engine._executor
    executor._parts = replace(executor._parts, device=torch.device("cuda"))
    met: list[tuple[Phase, int, SamplingParams]] = []
    ends = list[int]()

    def segment(
        self: LocalExecutor,
        phase: Phase,
        runs: Sequence[tuple[int, int]],
        params: SamplingParams = GREEDY,
    ) -> None:
        met.append((phase, sum(length for _, length in runs), params))
        ends.append(sum(runs[0]))

    def capture(self: StaticSteps, shape: StepGraph) -> None:
        met.append((Phase.DECODE, shape.tokens, GREEDY))

    monkeypatch.setattr(LocalExecutor, "_warm_segment", segment)
    monkeypatch.setattr(StaticSteps, "capture", capture)
    executor._tables = DeviceTables(executor._slots, torch.device("cpu"))
    graphs = (StepGraph(phase="decode", tokens=2, runs=2),)
    executor._parts = replace(executor._parts, graphs=graphs)
    executor.warm()
    drawn = [params for _, _, params in met if params.temperature > 0]
    most = executor._parts.step_tokens
    assert most == 2 * executor._parts.max_context  # the largest chunk takes two requests
    chunks = {length for phase, length, _ in met if phase is Phase.CHUNK}
    assert chunks >= {size for size in SIZES if size < 512} | {1, 16, most}
    captured = met.index((Phase.DECODE, 2, GREEDY), met.index((Phase.DECODE, 1, drawn[-1])))
    assert met[captured + 1 :] == [  # each with both requests
        (Phase.MIXED, most, GREEDY),
        (Phase.DECODE, 2, GREEDY),
        (Phase.CHUNK, most, GREEDY),
        (Phase.CHUNK, most, GREEDY),
    ]
    assert set(ends) >= {100, 200, 400, 512}  # tables of every width
    assert any(params.top_p == 1.0 and not params.top_k for params in drawn)
    assert any(params.top_p < 1.0 and params.top_k for params in drawn)
