"""What the engine is asked to do: token ids in, sampling parameters, limits.

Text never crosses into the engine; the server tokenises and detokenises.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal

import msgspec

from metainfer.core.errors import RequestError


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's words where they have one."""

    STOP = "stop"  # an end-of-sequence or stop id, or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"
    ERROR = "error"


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the answer must match: data only, read by whoever computes masks.

    `kind` and `text`: a JSON schema, a regular expression over the whole answer, a JSON list of
    texts, or the parts of an answer (`core.parts`). `after`: the ids that end reasoning; until they
    were drawn nothing is enforced, and of all ids `barred` alone may not be drawn. `opening`: the
    id with which the model may itself open reasoning; None where the prompt did, or where it
    cannot.
    """

    kind: Literal["json", "regex", "choice", "parts"]
    text: str
    after: tuple[int, ...] = ()
    opening: int | None = None
    barred: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. `temperature` 0 is greedy; ties go to the lower id.

    `logprobs` asks for the chosen token's log-probability plus that many alternatives
    (0 = only the chosen); None asks for nothing. `prompt_logprobs` likewise for the prompt.
    Penalties follow OpenAI (presence, frequency, over generated tokens) and Hugging Face
    (repetition, over prompt and generated tokens). `allowed_token_ids`: only these are drawn,
    if there are any; the end only if it is one of them. `bad_words`: runs of ids that the
    answer must not hold: the last of a run is not drawn behind the others. Under a `grammar`,
    `min_tokens` does not hold an end back where nothing else may be drawn.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarSpec | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether a draw depends on the tokens before it in another way than through the model."""
        neutral = not (self.presence_penalty or self.frequency_penalty or self.bad_words)
        return not neutral or self.repetition_penalty != 1.0

    def check(self, vocab_size: int) -> None:
        """Refuse values outside their range.

        Raises:
            RequestError: status 400, `param` names the field.
        """
        _bounded("temperature", self.temperature, 0.0, 2.0)
        _bounded("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _bounded("min_p", self.min_p, 0.0, 1.0)
        _bounded("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _bounded("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Far below, a division by it overflows float32 and the request ends as if logits were bad.
        _bounded("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _bounded("top_k", self.top_k, 0, vocab_size)
        _bounded("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _bounded("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _bounded("seed", self.seed, -(2**63), 2**63 - 1)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _bounded(name, count, 0, 20)
        for token, bias in self.logit_bias.items():
            _bounded("logit_bias", token, 0, vocab_size - 1)
            _bounded("logit_bias", bias, -100.0, 100.0)
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            *(("bad_words", word) for word in self.bad_words),
        ):
            for token in ids:
                _bounded(name, token, 0, vocab_size - 1)
        if not all(self.bad_words):
            raise RequestError("bad_words holds an empty word.", param="bad_words")


def _bounded(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise RequestError(
            f"{name} is {value}; it must be in {bracket}{low}, {high}].",
            param=name,
            code="invalid_value",
        )


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate. `request_id` is unique among live requests.

    `priority`: lower runs first. `cache_salt` separates tenants in the prefix cache. `adapter`: the
    name of one that was loaded at start; empty for the model itself.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
