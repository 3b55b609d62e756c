"""Tiny models with LoRA adapters against `transformers` with the adapter merged into its weights.

Base and adapters stand in one batch. The bars are those of the models without adapters
(`test_oracle_tiny`): a wrong scale, column or row is orders of magnitude beyond them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import FAMILIES, ask, save_tiny, start
from lora_files import ATTENTION, EVERY, Recipe, merged, save_adapter
from test_oracle_tiny import BARS, oracle

from metainfer.core.request import SamplingParams

RECIPES = {
    "qv": Recipe(("q_proj", "v_proj"), rank=4, alpha=6),
    "all": Recipe(
        EVERY,
        rank=8,
        alpha=4,
        rslora=True,
        ranks={"k_proj": 2, "down_proj": 11},
        alphas={"up_proj": 9.5, "q_proj": 3},
    ),
    "up": Recipe(("up_proj",), rank=1, alpha=2),
}


def make(family: str, folder: Path, seed: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Oracles by adapter ("": the model itself), and the folders of the adapters."""
    base = save_tiny(family, folder / "base", seed)
    oracles, folders = {"": base}, {}
    for number, (name, recipe) in enumerate(RECIPES.items()):
        tensors = save_adapter(folder / name, base, recipe, seed + number)
        oracles[name] = merged(base, recipe, tensors)
        folders[name] = str(folder / name)
    return oracles, folders


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_batch_equals_merged_models(
    family: str, dtype: str, tmp_path: Path, seed: int, rng
) -> None:
    oracles, folders = make(family, tmp_path, seed % 1000)
    engine = start(
        tmp_path / "base",
        dtype=dtype,
        chunk_tokens=37,
        concurrency=4,
        page_tokens=8,
        adapters=folders,
    )
    names = ["", "qv", "all", "up", "qv", "all", ""]
    prompts = [[rng.randrange(3, 131) for _ in range(n)] for n in (40, 17, 33, 21, 1, 9, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, logprobs=3)
    answers = ask(engine, prompts, params, adapters=names)
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        expected = oracle(oracles[name], prompt)
        got = torch.tensor([item.logprob for item in answer.prompt_logprobs], dtype=torch.float64)
        targets = torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(1)
        wanted = expected[:-1].gather(1, targets).squeeze(1)
        torch.testing.assert_close(got, wanted, rtol=0, atol=BARS[dtype])
        top = expected[-1].topk(3)
        values = torch.tensor([v for _, v in answer.logprobs[0].top], dtype=torch.float64)
        torch.testing.assert_close(values, top.values, rtol=0, atol=BARS[dtype])


def test_greedy_answers_equal_merged_models(tmp_path: Path, seed: int, rng) -> None:
    """Through decode steps in float64, all adapters at once."""
    oracles, folders = make("qwen3", tmp_path, seed % 1000)
    engine = start(tmp_path / "base", dtype="float64", concurrency=4, adapters=folders)
    names = list(oracles)
    prompts = [[rng.randrange(3, 131) for _ in range(12)]] * len(names)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    answers = ask(engine, prompts, params, adapters=names)
    assert len({tuple(answer.tokens) for answer in answers}) == len(names)
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = oracles[name].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert answer.tokens == expected[0, len(prompt) :].tolist()


def test_without_adapters_nothing_runs_and_the_plan_is_the_same(tmp_path: Path, seed: int) -> None:
    """A step without any adapter calls no op that a model without adapters would not call."""
    from metainfer.kernels.table import Trace

    base = save_tiny("llama", tmp_path / "base", seed)
    save_adapter(tmp_path / "a", base, Recipe(ATTENTION), seed)
    prompt, params = [list(range(3, 20))], SamplingParams(temperature=0.0, max_tokens=4)
    calls, plans = [], []
    for adapters in ({}, {"a": str(tmp_path / "a")}):
        trace = Trace()
        engine = start(tmp_path / "base", trace=trace, adapters=adapters)
        trace.calls.clear()
        ask(engine, prompt, params)
        calls.append(dict(trace.calls))
        plans.append(engine.resolved.plan)  # type: ignore[union-attr]
    assert calls[0] == calls[1]
    assert plans[0].adapters == () and not [key for key in plans[0].ops if "lora" in key]
    assert not [key for key in plans[0].values() if key.startswith("adapters")]
    assert plans[0].fingerprint != plans[1].fingerprint
