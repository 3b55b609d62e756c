"""Real weights: SmolLM2-135M against `transformers` float32 on the decoded weights."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness import ask, start

from metainfer.core.errors import UserError
from metainfer.core.request import SamplingParams

BAR = 1e-3
LENGTHS = (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 200, 300, 512, 513, 1000, 2000)


@pytest.fixture(scope="module")
def opened() -> Any:
    from metainfer.planner.opening import open_model

    try:
        return open_model("smollm2-135m")
    except UserError as error:
        pytest.skip(f"the model is not to be had: {error}")


@pytest.fixture(scope="module")
def engine(opened: Any) -> Any:
    return start("smollm2-135m", context=2100, concurrency=8, threads=2)


@pytest.fixture(scope="module")
def text(opened: Any) -> list[int]:
    """Real English and code: the licence of Python and a module of its library."""
    import argparse
    import inspect

    from metainfer.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf_metadata(opened.source.gguf_metadata)
    ids = tokenizer.encode(inspect.getsource(argparse))
    assert len(ids) > 2 * max(LENGTHS)
    return ids


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_logprobs_within_a_thousandth_of_transformers(
    opened: Any, engine: Any, text: list[int], rng: random.Random
) -> None:
    """Twenty prompts of 1 to 2,000 tokens; the worst difference over every position."""
    import torch

    from metainfer.bench.reference import transformers_model

    oracle = transformers_model(opened)
    torch.set_num_threads(2)
    starts = [rng.randrange(len(text) - n) for n in LENGTHS]
    prompts = [text[begin : begin + n] for begin, n in zip(starts, LENGTHS, strict=True)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    worst = 0.0
    for prompt, answer in zip(prompts, ask(engine, prompts, params), strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            scores = oracle(ids).logits[0].float().log_softmax(-1)
        got = [item.logprob for item in (*answer.prompt_logprobs, *answer.logprobs)]
        targets = torch.tensor([*prompt[1:], answer.tokens[0]]).unsqueeze(1)
        wanted = scores.gather(1, targets).squeeze(1)
        assert len(got) == len(prompt)
        worst = max(worst, float((torch.tensor(got) - wanted).abs().max()))
    assert worst <= BAR, f"worst log-probability difference {worst:.2e}"


def test_answers_the_capital_of_france(opened: Any, engine: Any) -> None:
    from metainfer.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf_metadata(opened.source.gguf_metadata)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    (answer,) = ask(engine, [ids], params, eos=opened.eos_token_ids)
    assert "Paris" in tokenizer.decode(answer.tokens)
