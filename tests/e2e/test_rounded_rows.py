"""Experts over two rank processes that send each other rounded rows answer as one process does.

Float64 and experts as stored (MXFP4, rounded by the recipe). A long run: `RANK_REQUESTS` over 12,
as `test_ranks_answers` has it; what is sent is in tests/models/test_deepseek_v4_meeting.py.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from harness import ask
from test_invariance import same

from metainfer.core.intent import Intent
from metainfer.core.request import SamplingParams
from metainfer.engine.engine import Engine
from metainfer.executor.ranks import RankExecutor
from metainfer.planner.dispatch import LEAST

MODEL = "random:tiny-deepseek-v4-fp4?layers=3&seed=5"
STORED = {"weight": "stored@1", "experts": "experts-stored@1"}
VOCAB, HIDDEN, CHUNK = 256, 256, 96

pytestmark = pytest.mark.skipif(
    int(os.environ.get("RANK_REQUESTS", "12")) <= 12, reason="a long run: RANK_REQUESTS"
)


def started(**wishes: Any) -> Engine:
    engine = Engine(
        Intent(
            model=MODEL,
            platform="cpu",
            dtype="float64",
            context=192,
            concurrency=2,
            chunk_tokens=CHUNK,
            prefix_cache=False,
            layouts=STORED,
            **wishes,
        ),
        lambda _: None,
    )
    engine.start()
    return engine


def test_rounded_rows_of_two_domains_change_no_token(rng: random.Random) -> None:
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (CHUNK + 9, LEAST + 2, 7)]
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)
    alone = started()
    wanted = [ask(alone, [prompt], params)[0] for prompt in prompts]
    alone.close()
    engine = started(parallel="ep2")
    try:
        for found, each in zip(ask(engine, prompts, params), wanted, strict=True):
            same(found, each)
        assert isinstance(engine._executor, RankExecutor)
        for rank in engine._executor._group.call("collectives"):
            plans = [plan["request"] for plan in rank["0-1"]["plans"]]  # type: ignore[index]
            rounded = [each for each in plans if each["dtype"] == "uint8"]
            assert any(each["count"] == 2 * CHUNK * HIDDEN for each in rounded)
    finally:
        engine.close()
