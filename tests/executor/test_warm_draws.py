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
from metainfer.executor.local import GREEDY, SIZES, LocalExecutor
from metainfer.executor.static import DeviceTables


def test_b30_warm_up_on_a_card_draws_and_meets_the_forms_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("metainfer.executor.local.WIDENS_FROM", 100)
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
        met.append((phase, runs[0][1], params))
        ends.append(sum(runs[0]))

    def capture(self: StaticSteps, shape: StepGraph) -> None:
        met.append((Phase.DECODE, shape.tokens, GREEDY))

    monkeypatch.setattr(LocalExecutor, "_warm_segment", segment)
    monkeypatch.setattr(StaticSteps, "capture", capture)
    executor._tables = DeviceTables(executor._slots, torch.device("cpu"))
    graphs = (StepGraph(phase="decode", tokens=2, runs=2),)
    executor._parts = replace(executor._parts, graphs=graphs)
    executor.warm()
    most = min(executor._parts.step_tokens, executor._parts.max_context)
    chunks = {length for phase, length, _ in met if phase is Phase.CHUNK}
    assert chunks >= {size for size in SIZES if size < most} | {1, 16, most}
    assert met[-2:] == [(Phase.DECODE, 2, GREEDY), (Phase.CHUNK, most, GREEDY)]
    assert set(ends) >= {100, 200, 400, 512}  # tables of every width
    drawn = [params for _, _, params in met if params.temperature > 0]
    assert any(params.top_p == 1.0 and not params.top_k for params in drawn)
    assert any(params.top_p < 1.0 and params.top_k for params in drawn)
