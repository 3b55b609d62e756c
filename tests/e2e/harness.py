"""Small engines for end-to-end tests: a tiny checkpoint on disk, an engine on it, answers out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metainfer.core.intent import Intent
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.core.step import TokenLogprobs
from metainfer.engine.engine import Engine

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")

_COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_COMMON, "attention_bias": True, "tie_word_embeddings": False},
    "qwen2": {
        **_COMMON,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {**_COMMON, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {**_COMMON, "head_dim": 8, "sliding_window": 17, "tie_word_embeddings": False},
}


def save_tiny(family: str, folder: Path, seed: int, **changes: object) -> Any:
    """A random `transformers` model of `family`, saved in float32 and returned in float64.

    Weights are drawn wider than usual so that attention is not uniform and biases matter.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**CONFIGS[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.double()


@dataclass(slots=True)
class Answer:
    """What an engine said to one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: str = ""


def start(model: str | Path, *, trace: Any = None, **intent: Any) -> Engine:
    """A started engine with a warm-up behind it."""
    engine = Engine(Intent(model=str(model), **{"threads": 1, **intent}), trace=trace)
    engine.start()
    return engine


_names = itertools.count()


def ask(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    eos: tuple[int, ...] = (),
    adapters: Sequence[str] = (),
    before_step: Callable[[int, Engine], None] | None = None,
    audit: bool = True,
) -> list[Answer]:
    """Submit all prompts, run until idle, return answers in order."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    answers: dict[str, Answer] = {}
    chosen = adapters or [""] * len(prompts)
    for prompt, wanted, adapter in zip(prompts, each, chosen, strict=True):
        name = f"r{next(_names)}"
        answers[name] = Answer()
        engine.submit(Request(name, tuple(prompt), wanted, eos, adapter=adapter))
    for step in itertools.count():
        if before_step is not None:
            before_step(step, engine)
        if not engine.has_work:
            break
        outputs, _ = engine.step()
        for output in outputs:
            if output.request_id in answers:
                take(answers[output.request_id], output)
        assert step < 100_000, "the engine does not come to an end"
    if audit:
        engine.scheduler.audit()
    return list(answers.values())


def take(answer: Answer, output: Any) -> None:
    """Add one output to an answer; positions must follow each other without a gap."""
    assert output.index == len(answer.tokens) or not output.tokens
    assert answer.finish is None, "an output came after the last one"
    answer.tokens += output.tokens
    answer.logprobs += output.logprobs
    answer.prompt_logprobs += output.prompt_logprobs
    answer.finish = output.finish
    answer.cached_tokens = max(answer.cached_tokens, output.cached_tokens)
    answer.error = answer.error or output.error
