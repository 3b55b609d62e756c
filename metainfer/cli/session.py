"""One engine for the verbs that talk to it directly: start, generate, close."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from metainfer.cli.clients import Screen, make_client
from metainfer.core.errors import RequestError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.model_text import TextTools, load_text
from metainfer.engine.protocol import EngineInfo
from metainfer.engine.text_stream import TextStream

if TYPE_CHECKING:
    from metainfer.text.dialogue import Prompt


@dataclass(slots=True)
class Answer:
    """What one generation gave; grows while it runs, so that an interrupted one is still here.

    Times are seconds on one clock: `began` at submission, `first` and `last` at tokens.
    """

    prompt_tokens: int
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0
    began: float = 0.0
    first: float = 0.0
    last: float = 0.0
    first_tokens: int = 0

    def document(self) -> dict[str, Any]:
        """The contract of ``generate --json``; `reasoning` only where there is some."""
        return {
            "text": self.text,
            **({"reasoning": self.reasoning} if self.reasoning else {}),
            "token_ids": self.token_ids,
            "finish_reason": self.finish,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.token_ids),
                "total_tokens": self.prompt_tokens + len(self.token_ids),
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            },
            "timing": {"ttft_s": self.ttft_s, "decode_tok_s": self.decode_tok_s},
        }

    @property
    def ttft_s(self) -> float | None:
        return self.first - self.began if self.token_ids else None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first output; None when there was only one."""
        count = len(self.token_ids) - self.first_tokens
        return count / (self.last - self.first) if count > 0 and self.last > self.first else None


class Session:
    """A started engine on an event loop of its own; `with` it. Answers are those of the intent's
    adapter where it has one.

    Ctrl-C during `generate` cancels the request and raises KeyboardInterrupt; the session goes on.
    """

    def __init__(self, intent: Intent, screen: Screen) -> None:
        """Raises UsageError: several adapters, of which none is meant."""
        if len(intent.adapters) > 1:
            raise UsageError(
                f"--adapter names {len(intent.adapters)} adapters, and one of them has to answer.",
                "Name one here; serve takes many.",
            )
        self._adapter = next(iter(intent.adapters), "")
        self._runner = asyncio.Runner()
        self._client = make_client(intent, screen)
        self.info: EngineInfo
        self.text: TextTools

    def __enter__(self) -> Session:
        try:
            self.info = self._runner.run(self._client.start())
            self.text = load_text(self.info.model, self.info.vocab_size)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.run(self._client.close(drain=False, grace_s=5.0))
        self._runner.close()

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stops: Sequence[str] = (),
        on_text: Callable[[str], None] = lambda text: None,
        on_reasoning: Callable[[str], None] = lambda text: None,
        chat: Prompt | None = None,
        answer: Answer | None = None,
    ) -> Answer:
        """Generate; `answer`, when given, is filled as tokens come. With `chat`, the prompt of a
        conversation, reasoning comes apart from the text.

        Raises:
            RequestError: the prompt does not fit, or the engine refused or died.
        """
        answer = Answer(len(prompt)) if answer is None else answer
        stream = (
            TextStream(self.text.tokenizer, stops, params=params)
            if chat is None
            else self.text.answer_stream(stops, params, chat, calls="text")
        )
        work = self._generate(tuple(prompt), params, stream, (on_text, on_reasoning), answer)
        self._runner.run(work)
        return answer

    def room(self, prompt: Sequence[int], wanted: int | None) -> int:
        """How many tokens may follow `prompt`: `wanted` or what is left.

        Raises:
            RequestError: ``context_length_exceeded``.
        """
        left = self.info.max_context - len(prompt)
        if left < 1 or (wanted or 0) > left:
            raise RequestError(
                f"The context holds {self.info.max_context} tokens; the prompt has {len(prompt)}"
                + (f" and {wanted} more are asked for." if wanted else "."),
                "Shorten the prompt, lower --max-tokens or raise --context.",
                code="context_length_exceeded",
            )
        return wanted or left

    async def _generate(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        stream: TextStream,
        show: tuple[Callable[[str], None], Callable[[str], None]],
        answer: Answer,
    ) -> None:
        params.check(self.info.vocab_size)
        request = Request(
            uuid.uuid4().hex, prompt, params, self.info.eos_token_ids, adapter=self._adapter
        )
        answer.began = time.perf_counter()
        async with aclosing(self._client.submit(request)) as outputs:
            async for output in outputs:
                delta = stream.push(output)
                now = time.perf_counter()
                if delta.tokens and not answer.token_ids:
                    answer.first, answer.first_tokens = now, len(delta.tokens)
                answer.last = now if delta.tokens else answer.last
                answer.token_ids += delta.tokens
                answer.text += delta.text
                answer.reasoning += delta.reasoning
                answer.cached_tokens = stream.cached_tokens
                for tell, text in zip(show, (delta.text, delta.reasoning), strict=True):
                    if text:
                        tell(text)
                if delta.finish is not None:
                    answer.finish = delta.finish
                    return
