"""Cases of `sample`: ties, every filter, penalties, masks, broken rows, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from metainfer.ops.case import Case, generator, integers, normal
from metainfer.ops.sample.inputs import SampleInputs, count_tokens
from metainfer.ops.sample.ref import sample

V = 700


def random_rows(g: torch.Generator, rows: int) -> dict[str, Any]:
    """Temperature, seeds and indices of `rows` rows that draw."""
    return {
        "temperature": torch.rand(rows, generator=g) + 0.5,
        "seed": integers(g, 2**40, rows) - 2**39,
        "index": integers(g, 1000, rows),
    }


def _case(name: str, logits: torch.Tensor, inputs: SampleInputs) -> Case:
    shape = {"rows": logits.shape[0], "v": logits.shape[1]}
    return Case(op="sample", name=name, args=(logits, inputs), shape=shape, exact=True)


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    rows = 9
    logits = normal(g, rows, V, scale=3.0)
    tied = logits.round()
    draws = random_rows(g, rows)
    top_k = torch.tensor([0, 1, 2, 5, 50, 300, V, 0, 3])
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.1, 0.99, 0.999, 0.9, 1e-4, 1.0])
    min_p = torch.tensor([0.0, 0.1, 0.5, 1.0, 0.01, 0.0, 0.2, 0.0, 0.3])
    broken = logits.clone()
    broken[0, 5], broken[1], broken[2, 7] = float("nan"), float("-inf"), float("inf")
    broken[3, 1:] = float("-inf")
    history = [integers(g, V, 4 * i).tolist() for i in range(rows)]
    penalties: dict[str, Any] = {
        "presence": torch.linspace(-2, 2, rows),
        "frequency": torch.linspace(2, -2, rows),
        "repetition": torch.linspace(0.5, 2, rows),
        "output_counts": count_tokens(history, V),
        "prompt_seen": count_tokens(history[::-1], V) > 0,
    }
    ban_rows, ban_tokens = torch.tensor([0, 0, 4]), torch.tensor([3, 9, V - 1])
    mask = torch.rand(rows, V, generator=g) < 0.05
    mask[2] = False
    greedy = SampleInputs(greedy=True)
    return [
        _case("greedy", logits, greedy),
        _case("greedy-ties", tied, greedy),
        _case("greedy-flat", torch.zeros(3, V, dtype=torch.float64), greedy),
        _case("greedy-broken", broken, greedy),
        _case("greedy-logprobs", tied, SampleInputs(greedy=True, top_logprobs=5)),
        _case("none", logits[:0], SampleInputs(greedy=True, top_logprobs=2)),
        _case("one-id", logits[:, :1], SampleInputs(**draws, top_p=top_p)),
        _case("plain", logits, SampleInputs(**draws, top_logprobs=0)),
        _case("top-k", logits, SampleInputs(**draws, top_k=top_k)),
        _case("top-k-ties", tied, SampleInputs(**draws, top_k=top_k)),
        _case("top-p", logits, SampleInputs(**draws, top_p=top_p)),
        _case("top-p-flat", tied * 1e-3, SampleInputs(**draws, top_p=top_p)),
        _case("min-p", logits, SampleInputs(**draws, min_p=min_p)),
        _case(
            "all-filters",
            tied,
            SampleInputs(**draws, top_k=top_k, top_p=top_p, min_p=min_p, top_logprobs=3),
        ),
        _case("some-greedy", logits, SampleInputs(**{**draws, "temperature": top_p.round()})),
        _case("cold", logits, SampleInputs(**{**draws, "temperature": draws["seed"] * 0 + 1e-6})),
        _case("penalties", logits, SampleInputs(**draws, **penalties, top_logprobs=2)),
        _case("penalties-greedy", logits, SampleInputs(greedy=True, **penalties)),
        _case(
            "bias-bans",
            logits,
            SampleInputs(
                **draws,
                bias_rows=torch.tensor([1, 1, 5]),
                bias_tokens=torch.tensor([0, 0, 8]),
                bias_values=torch.tensor([50.0, 50.0, -100.0]),
                ban_rows=ban_rows,
                ban_tokens=ban_tokens,
            ),
        ),
        _case("mask", logits, SampleInputs(**draws, allowed=mask)),
        _case("broken", broken, SampleInputs(**draws, top_k=top_k, top_p=top_p, top_logprobs=1)),
    ]


CASES = {"sample": cases}
REFERENCES = {"sample": sample}
RECIPES = {"sample": sample}


def _without(name: str, value: float) -> Callable[..., Any]:
    """`name` of every row is `value`."""

    def wrong(logits: torch.Tensor, inputs: SampleInputs) -> Any:
        if (held := getattr(inputs, name)) is None:
            return sample(logits, inputs)
        changed: dict[str, Any] = {name: torch.full_like(held, value)}
        return sample(logits, replace(inputs, **changed))

    return wrong


MISTAKES = {
    "sample": {
        "seed": (_without("seed", 0),),
        "draw index": (_without("index", 0),),
        "temperature": (_without("temperature", 1.0),),
        "top-k": (_without("top_k", 0),),
        "top-p": (_without("top_p", 1.0),),
        "min-p": (_without("min_p", 0.0),),
        "repetition penalty": (_without("repetition", 1.0),),
    }
}
