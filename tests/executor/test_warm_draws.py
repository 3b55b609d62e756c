"""B-30: what a first request asks for is launched before an engine is ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from metainfer.core.intent import Intent
from metainfer.core.request import SamplingParams
from metainfer.core.step import Phase
from metainfer.engine.engine import Engine
from metainfer.executor.local import GREEDY, SIZES, LocalExecutor


def test_b30_warm_up_on_a_card_draws_and_meets_the_forms_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(Intent(model="random:tiny-llama", platform="cpu", context=512, concurrency=2))
    engine.start()
    executor: Any = engine._executor
    executor._parts = replace(executor._parts, device=torch.device("cuda"))
    met: list[tuple[Phase, int, SamplingParams]] = []

    def segment(
        self: LocalExecutor,
        phase: Phase,
        runs: Sequence[tuple[int, int]],
        params: SamplingParams = GREEDY,
    ) -> None:
        met.append((phase, runs[0][1], params))

    monkeypatch.setattr(LocalExecutor, "_warm_segment", segment)
    executor.warm()
    most = min(executor._parts.step_tokens, executor._parts.max_context)
    chunks = {length for phase, length, _ in met if phase is Phase.CHUNK}
    assert chunks >= {size for size in SIZES if size < most} | {1, 16, most}
    drawn = [params for _, _, params in met if params.temperature > 0]
    assert any(params.top_p == 1.0 and not params.top_k for params in drawn)
    assert any(params.top_p < 1.0 and params.top_k for params in drawn)
