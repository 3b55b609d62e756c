"""From a checked body to engine requests: model name, prompt ids, limits, sampling parameters."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar, cast

import msgspec

from metainfer.core.errors import RequestError
from metainfer.core.request import GrammarSpec, Request, SamplingParams
from metainfer.engine.model_text import TextTools
from metainfer.engine.protocol import EngineInfo
from metainfer.engine.text_stream import TextStream, expand
from metainfer.server.dialogue import conversation_of, size_of
from metainfer.server.enforced import call_grammar
from metainfer.server.schemas import MAX_PROMPTS, ChatRequest, CompletionRequest, Sampling
from metainfer.server.state import ServerConfig, ServerState
from metainfer.server.structured import check, grammar_of, placed
from metainfer.server.tool_choice import choice_of
from metainfer.text.dialogue import Conversation, Prompt

T = TypeVar("T")
CallsMode = Literal["read", "enforced", "drop", "text"]

_INLINE_CHARS = 4096
_LEGACY_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(slots=True)
class Times:
    """When what happened to a choice, on `time.perf_counter`'s clock; 0.0: not yet.

    `queue_s` is the scheduler's own measurement, None where it did not tell.
    """

    submitted: float = 0.0
    first: float = 0.0
    last: float = 0.0
    queue_s: float | None = None

    @property
    def prefill_s(self) -> float:
        """From the first step to the first token, as seen from here."""
        return max(self.first - self.submitted - (self.queue_s or 0.0), 0.0)


@dataclass(slots=True)
class Choice:
    """One generation: its place in the answer, its engine request, its text."""

    index: int
    prompt: int
    request: Request
    text: TextStream
    times: Times = field(default_factory=Times)


@dataclass(slots=True)
class Job:
    """Everything one HTTP request generates. `model` is the name the client used; `arrived` is
    on `time.perf_counter`'s clock."""

    id: str
    arrived: float
    created: int
    model: str
    fingerprint: str
    tools: TextTools
    prompts: list[tuple[int, ...]]
    choices: list[Choice]
    notes: tuple[str, ...] = ()  # what every choice's remarks begin with
    usage_at_end: bool = False
    usage_always: bool = False

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage block; a prompt counts once, however many choices share it."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.text.completion_tokens for choice in self.choices)
        cached = [0] * len(self.prompts)
        for choice in reversed(self.choices):
            cached[choice.prompt] = choice.text.cached_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
        }
        if self.tools.format.markup.think is not None:
            reasoned = sum(choice.text.reasoning_tokens for choice in self.choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoned}
        return usage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the two routes spell differently. `default_tokens` None: whatever fits."""

    prefix: str
    arrived: float
    prompts: list[tuple[int, ...]]
    max_tokens: int | None
    default_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    chat: Prompt | None = None
    calls: CallsMode = "text"
    one_call: bool = False
    fit: bool = False
    notes: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` here when its input is small, else on a thread so that streams go on."""
    if size <= _INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(), work)


@cache
def _threads() -> ThreadPoolExecutor:
    """Two threads: each that computes makes the loop wait for its turn, and keeps a heap."""
    return ThreadPoolExecutor(2, "prepare")


def check_model(config: ServerConfig, name: str) -> None:
    """Refuse a model that is not served here (404 ``model_not_found``)."""
    if name not in config.served:
        raise RequestError(
            f"Model {name[:200]!r} is not served here.",
            f"Use {config.model_names[0]!r}.",
            status=404,
            error_type="not_found_error",
            param="model",
            code="model_not_found",
        )


async def chat_job(
    state: ServerState,
    body: ChatRequest,
    arrived: float,
    *,
    prefix: str = "chatcmpl-",
    fit: bool = False,
) -> Job:
    """The job of a chat request. `prefix` of its id; `fit`: a limit beyond the context is cut to
    what fits.

    Raises:
        RequestError: another model, a bad template variable, no room in the context.
    """
    info, text = state.serving()
    check_model(state.config, body.model)
    state.config.bounds.check(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            "top_logprobs is given without logprobs.", "Set logprobs to true.", param="top_logprobs"
        )
    wish = grammar_of(body)
    choice = choice_of(body)
    conversation = await off_loop(size_of(body), lambda: conversation_of(text, body))
    if wish is not None:
        await check(wish, info.grammar_library)
    prompt = await off_loop(size_of(body), lambda: text.format.encode(conversation))
    calls: GrammarSpec | None = None
    notes: tuple[str, ...] = ()
    if conversation.tools:
        calls, notes = await call_grammar(
            text, conversation.tools, choice, wish, prompt, info.grammar_library
        )
    grammar = calls
    if calls is None and wish is not None:
        grammar = placed(wish[1], text, prompt)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    asked = _Asked(
        prefix=prefix,
        fit=fit,
        arrived=arrived,
        prompts=[tuple(prompt.ids)],
        max_tokens=wanted,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        chat=prompt,
        calls="enforced" if calls is not None else _calls_mode(body, conversation),
        one_call=choice.one,
        grammar=grammar,
        notes=notes,
    )
    return _job(state, body, info, asked)


def _calls_mode(body: ChatRequest, conversation: Conversation) -> CallsMode:
    """Without tools in the conversation a marker is text; a call nobody offered is dropped."""
    if conversation.tools:
        return "read"
    known = body.tools or any(turn.calls for turn in conversation.turns)
    return "drop" if known else "text"


async def completion_job(state: ServerState, body: CompletionRequest, arrived: float) -> Job:
    """The job of a legacy completion request, one prompt or many."""
    info, text = state.serving()
    check_model(state.config, body.model)
    state.config.bounds.check(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            "best_of differs from n.",
            "Leave it out: candidates are not ranked here.",
            param="best_of",
            code="unsupported_parameter",
        )
    wish = grammar_of(body)
    if wish is not None:
        await check(wish, info.grammar_library)
    asked = _Asked(
        prefix="cmpl-",
        arrived=arrived,
        prompts=await _prompts(body, text),
        max_tokens=body.max_tokens,
        default_tokens=_LEGACY_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        grammar=None if wish is None else wish[1],
    )
    return _job(state, body, info, asked)


async def _prompts(body: CompletionRequest, text: TextTools) -> list[tuple[int, ...]]:
    encode = text.tokenizer.encode
    prompt = body.prompt
    if isinstance(prompt, str):
        return await off_loop(len(prompt), lambda: [tuple(encode(prompt))])
    kinds = set(map(type, prompt))  # there may be a million items
    if kinds == {int}:
        return [tuple(cast("list[int]", prompt))]
    if len(kinds) > 1:
        raise RequestError(
            "prompt mixes texts, token ids and lists.",
            "Send one text, a list of texts, token ids, or a list of lists of token ids.",
            param="prompt",
            code="invalid_type",
        )
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"{len(prompt)} prompts are given, at most {MAX_PROMPTS} may be.",
            "Send fewer.",
            param="prompt",
        )
    if kinds == {list}:
        return [tuple(item) for item in cast("list[list[int]]", prompt)]
    texts = cast("list[str]", prompt)
    return await off_loop(sum(map(len, texts)), lambda: [tuple(encode(item)) for item in texts])


def _job(state: ServerState, body: Sampling, info: EngineInfo, asked: _Asked) -> Job:
    n = body.n or 1
    state.admit(n * len(asked.prompts))
    _, text = state.serving()  # it may have begun to drain while the prompt was encoded
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    job = Job(
        id=f"{asked.prefix}{uuid.uuid4().hex}",
        arrived=asked.arrived,
        created=int(time.time()),
        model=body.model,
        fingerprint=f"{'emulated' if state.emulated else 'fp'}_{state.fingerprint}",
        tools=text,
        prompts=asked.prompts,
        choices=[],
        notes=asked.notes,
    )
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError(
                "stream_options is given without stream.",
                "Set stream to true or leave it out.",
                param="stream_options",
            )
        job.usage_at_end = bool(body.stream_options.include_usage)
        job.usage_always = bool(body.stream_options.continuous_usage_stats)
    words = _bad_words(body, text)
    limits = [_max_tokens(prompt, asked, info) for prompt in asked.prompts]
    state.config.bounds.check_total(n * sum(limits))
    for place, (prompt, limit) in enumerate(zip(asked.prompts, limits, strict=True)):
        params = sampling_params(body, limit, asked.logprobs, asked.prompt_logprobs, asked.grammar)
        params = msgspec.structs.replace(params, bad_words=words)
        params.check(info.vocab_size)
        request = Request(
            request_id=f"{job.id}-{place}",
            prompt=prompt,
            params=params,
            eos_token_ids=info.eos_token_ids,
            priority=state.priority(body.priority),
            cache_salt=body.cache_salt or "",
            adapter=body.model if body.model in state.config.adapters else "",
        )
        for engine_request in expand(request, n):
            if asked.chat is None:
                stream = TextStream(text.tokenizer, stops, params=params)
            else:
                stream = text.answer_stream(
                    stops, params, asked.chat, calls=asked.calls, one_call=asked.one_call
                )
            job.choices.append(Choice(len(job.choices), place, engine_request, stream))
    return job


def _bad_words(body: Sampling, text: TextTools) -> tuple[tuple[int, ...], ...]:
    """The ids of each word as the tokenizer writes it, at a text's beginning and within one."""
    encode = text.tokenizer.encode_literal
    spelled = [s for word in body.bad_words or () for s in (word, f" {word.lstrip()}")]
    return tuple(dict.fromkeys(ids for word in spelled if (ids := tuple(encode(word)))))


def _max_tokens(prompt: tuple[int, ...], asked: _Asked, info: EngineInfo) -> int:
    """How many tokens may follow `prompt`; `RequestError` when there is no room."""
    wanted, default = asked.max_tokens, asked.default_tokens
    if not prompt:
        raise RequestError("The prompt is empty.", "Send at least one token.", param="prompt")
    worst = max(prompt)
    if worst >= info.vocab_size:
        raise RequestError(
            f"Token id {worst} is out of range; the vocabulary has {info.vocab_size} tokens.",
            param="prompt",
        )
    room = info.max_context - len(prompt)
    if wanted is None and room > 0:
        return room if default is None else min(default, room)
    needed = 1 if wanted is None else wanted
    if asked.fit and needed > room > 0:
        return room
    if needed > room or room < 0:
        total = len(prompt) + needed
        raise RequestError(
            f"This model's maximum context length is {info.max_context} tokens; the request needs "
            f"{total}: {len(prompt)} in the prompt and {needed} to generate, "
            f"{total - info.max_context} too many.",
            "Shorten the prompt or ask for fewer tokens.",
            param="messages" if default is None else "prompt",
            code="context_length_exceeded",
        )
    return needed


def sampling_params(
    body: Sampling,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: GrammarSpec | None = None,
) -> SamplingParams:
    """The engine's sampling parameters; None means OpenAI's default."""
    if grammar is not None and body.ignore_eos:
        raise RequestError(
            "ignore_eos contradicts structured output, whose end is the answer's end.",
            "Leave one of them out.",
            param="ignore_eos",
        )
    if (body.min_tokens or 0) > max_tokens:
        raise RequestError(
            f"min_tokens is {body.min_tokens}, more than the {max_tokens} that may follow.",
            param="min_tokens",
        )
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        grammar=grammar,
    )
