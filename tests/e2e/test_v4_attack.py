"""Corners of DeepSeek-V4 at which something once broke, through the engine."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import v4
from harness import ask, start
from test_invariance import same

from metainfer.core.request import SamplingParams

PLAIN = {"kv": "latent@1", "index": "index@1"}
FIXED: Mapping[str, Any] = {"dtype": "float64", "layouts": PLAIN}


def test_a_draft_layer_beside_layers_of_other_kinds(tmp_path: Path) -> None:
    """No layer of the model has a window alone or routes by scores; the draft's does both."""
    only = {"num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 2}
    v4.save_with_mtp(v4.tiny(3, **only), tmp_path, seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    prompt = [[(i * 37) % 256 for i in range(21)]]
    wish = {"context": 64, "concurrency": 1, "chunk_tokens": 32, **FIXED}
    (plain,) = ask(start(tmp_path, **wish), prompt, params)
    (drafted,) = ask(start(tmp_path, draft="mtp:2", **wish), prompt, params)
    assert drafted.tokens == plain.tokens


def test_a_draft_stops_where_the_context_ends(tmp_path: Path) -> None:
    """Of two sequences one wants seven guesses, the other has room for fewer."""
    one = {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0}
    v4.save_with_mtp(v4.tiny(3, **one), tmp_path, seed=5)
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (34, 3)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, logprobs=0) for n in (14, 30)]
    wish = {"context": 48, "chunk_tokens": 64, **FIXED, "layouts": {"kv": "latent@1"}}
    drafting = start(tmp_path, concurrency=2, draft="mtp:7", **wish)
    alone = start(tmp_path, concurrency=1, prefix_cache=False, **wish)
    for answer, prompt, wanted in zip(ask(drafting, prompts, params), prompts, params, strict=True):
        same(answer, ask(alone, [prompt], wanted)[0])
    with pytest.raises(AssertionError):  # the comparison can fail
        same(*ask(alone, prompts, params))
