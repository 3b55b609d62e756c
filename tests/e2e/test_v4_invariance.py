"""A prefix hit at every alignment: windows, entries, index keys and rows resume as computed.

Random schedules of the same model, with drafts, are in `test_speculation`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import v4
from harness import ask, start
from test_invariance import same

from metainfer.core.request import SamplingParams
from metainfer.engine.engine import Engine

PLAIN = {"kv": "latent@1", "index": "index@1"}
THREE = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
CONTEXT = 160


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4")
    # One layer of each kind: schedules are about caches, not depth.
    v4.save(v4.tiny(21, **THREE), folder)
    return folder


def engine_of(checkpoint: Path, **intent: object) -> Engine:
    fixed = {"dtype": "float64", "context": CONTEXT, "layouts": PLAIN}
    return start(checkpoint, **{**fixed, **intent})


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Engine:
    return engine_of(checkpoint, concurrency=1, prefix_cache=False)


@pytest.mark.parametrize("page", [16, 32])
def test_hits_at_every_alignment(checkpoint: Path, alone: Engine, page: int) -> None:
    """A prompt of every length up to three pages, computed before, then found."""
    rng = random.Random(page)
    stem = [rng.randrange(3, 256) for _ in range(3 * page + 8)]
    engine = engine_of(checkpoint, page_tokens=page, concurrency=2, chunk_tokens=24)
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=0)
    ask(engine, [stem], params)
    for length in range(1, len(stem) + 1, 3 if page == 32 else 1):
        prompt = [*stem[:length], 7, 9]
        (answer,) = ask(engine, [prompt], params)
        same(answer, ask(alone, [prompt], params, audit=False)[0])
        assert answer.cached_tokens == length // page * page
