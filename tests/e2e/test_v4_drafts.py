"""DeepSeek-V4's own draft layer (MTP): no token changes, and its guesses are the formula's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import v4
from harness import Answer, ask, start
from test_invariance import same
from torch import Tensor
from v4_mtp import PlainMtp

from metainfer.core.errors import RefusedError
from metainfer.core.request import SamplingParams
from metainfer.engine.engine import Engine

PLAIN = {"kv": "latent@1", "index": "index@1"}
FIXED: Mapping[str, Any] = {
    "dtype": "float64",
    "context": 192,
    "layouts": PLAIN,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("mtp")
    return folder, v4.save_with_mtp(v4.tiny(31), folder, seed=5)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    stem = [rng.randrange(3, 256) for _ in range(40)]
    return [
        stem[: rng.randrange(41)] + [rng.randrange(3, 256) for _ in range(rng.randrange(1, 40))]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def plain(
    checkpoint: tuple[Path, Any],
) -> tuple[list[list[int]], list[SamplingParams], list[Answer]]:
    """What is asked, and what the model answers without drafts."""
    rng = random.Random(1)
    asked = prompts(rng, 6)
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 0.8)), seed=i, max_tokens=rng.randrange(1, 60), logprobs=0
        )
        for i in range(len(asked))
    ]
    engine = start(checkpoint[0], concurrency=3, chunk_tokens=32, **FIXED)
    return asked, params, ask(engine, asked, params)


@pytest.mark.parametrize("depth", [1, 7])
def test_drafts_change_no_token(checkpoint: tuple[Path, Any], plain: Any, depth: int) -> None:
    folder, _ = checkpoint
    asked, params, answers = plain
    drafting = start(folder, concurrency=3, chunk_tokens=32, draft=f"mtp:{depth}", **FIXED)
    for answer, wanted in zip(ask(drafting, asked, params), answers, strict=True):
        same(answer, wanted)
    stats = drafting.stats()
    assert stats.drafted_tokens > 50


def test_guesses_are_the_formulas(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    """Each guess of the engine, incremental over its cache, against section 2.8 in one pass."""
    folder, tensors = checkpoint
    engine = start(folder, concurrency=1, chunk_tokens=16, draft="mtp:1", **FIXED)
    seen, drafter = [], engine._executor._parts.model_drafts  # type: ignore[union-attr]
    propose = drafter.propose

    def recorded(starts: Any) -> Any:
        made = propose(starts)
        firsts = [guesses[0] for guesses in made]
        seen.extend(zip(starts.positions.tolist(), firsts, strict=True))
        return made

    drafter.propose = recorded
    prompt = prompts(random.Random(9), 1)[0]
    (answer,) = ask(engine, [prompt], SamplingParams(temperature=0.0, max_tokens=30))
    whole = prompt + answer.tokens
    streams = _streams(engine, whole)
    parts = engine._executor._parts  # type: ignore[union-attr]
    plain = PlainMtp(tensors, parts.model.arch, parts.model.tables[0])
    wanted = plain.guesses(whole, streams)
    assert len(seen) > 10
    for position, guess in seen:
        assert guess == wanted[position], position


def _streams(engine: Engine, ids: list[int]) -> Tensor:
    """The model's streams [T, N, D] for every token, from a run of its own."""
    parts = engine._executor._parts  # type: ignore[union-attr]
    kept: list[Tensor] = []
    forward = parts.model.forward

    def keep(*args: Any) -> Any:
        hidden = forward(*args)
        kept.append(hidden.streams)
        return hidden

    parts.model.forward = keep
    ask(engine, [ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    parts.model.forward = forward
    return torch.cat(kept)[: len(ids)]


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    v4.save(v4.tiny(1), tmp_path)
    with pytest.raises(RefusedError, match="no draft module"):
        start(tmp_path, draft="mtp", **FIXED)
