"""Tiny random models of each family against `transformers`, in float64 and float32.

A failure in float64 means that an equation differs (a norm, a bias, a window's edge, a rotation);
one in float32 alone means that a kernel rounds more than it should.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import FAMILIES, ask, save_tiny, start

from metainfer.core.request import SamplingParams

# transformers takes RMSNorm's statistics and rotary angles in float32 whatever the model's type, so
# its "float64" is good to about 2e-6 here (angles of position 100 round by 4e-6 radians).
BARS = {"float64": 5e-6, "float32": 2e-4}


def oracle(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of every position, float64."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_match_transformers(
    family: str, dtype: str, tmp_path: Path, seed: int, rng
) -> None:
    model = save_tiny(family, tmp_path, seed)
    engine = start(tmp_path, dtype=dtype, chunk_tokens=37, concurrency=4, page_tokens=8)
    prompts = [[rng.randrange(3, 131) for _ in range(n)] for n in (1, 2, 7, 16, 17, 40, 101)]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3, logprobs=3)
    for prompt, answer in zip(prompts, ask(engine, prompts, params), strict=True):
        expected = oracle(model, prompt)
        got = torch.tensor([item.logprob for item in answer.prompt_logprobs], dtype=torch.float64)
        targets = torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(1)
        wanted = expected[:-1].gather(1, targets).squeeze(1)
        assert len(got) == len(prompt) - 1
        torch.testing.assert_close(got, wanted, rtol=0, atol=BARS[dtype])
        first = answer.logprobs[0]
        assert first.token == answer.tokens[0] == int(expected[-1].argmax())
        top = expected[-1].topk(3)
        assert [token for token, _ in first.top] == top.indices.tolist()
        values = torch.tensor([value for _, value in first.top], dtype=torch.float64)
        torch.testing.assert_close(values, top.values, rtol=0, atol=BARS[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_match_transformers(family: str, tmp_path: Path, seed: int, rng) -> None:
    """Token by token in float64, through decode steps, past windows and page borders."""
    model = save_tiny(family, tmp_path, seed)
    engine = start(tmp_path, dtype="float64", chunk_tokens=16, concurrency=3, page_tokens=8)
    prompts = [[rng.randrange(3, 131) for _ in range(n)] for n in (1, 9, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    for prompt, answer in zip(prompts, ask(engine, prompts, params), strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert answer.tokens == expected[0, len(prompt) :].tolist()


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_variants_match_transformers(kind: str, tmp_path: Path, seed: int, rng) -> None:
    rope = {"rope_theta": 5000.0, **ROPES[kind]}
    model = save_tiny("llama", tmp_path, seed, rope_parameters=rope)
    engine = start(tmp_path, dtype="float64", page_tokens=16)
    prompt = [rng.randrange(3, 131) for _ in range(120)]
    (answer,) = ask(engine, [prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    expected = oracle(model, prompt)[:-1]
    wanted = expected.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    got = torch.tensor([item.logprob for item in answer.prompt_logprobs], dtype=torch.float64)
    # transformers computes angles in float32; ours are float64 rounded once.
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
