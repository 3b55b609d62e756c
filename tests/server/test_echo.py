"""`echo` with `logprobs`: the engine scores a long prompt chunk by chunk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from metainfer.core.request import FinishReason, Request
from metainfer.core.step import RequestOutput, TokenLogprobs
from metainfer.engine.model_text import byte_text
from metainfer.engine.protocol import EngineInfo, EngineStats
from metainfer.server.app import new_state
from metainfer.server.completions import completion_answer, completion_events
from metainfer.server.prepare import completion_job
from metainfer.server.schemas import CompletionRequest
from metainfer.server.state import ServerConfig, ServerState

PROMPT = "abcdefgh"
SCORES = [-0.5 * place for place in range(1, len(PROMPT))]


class ChunkedEngine:
    """Answers every request alike: scores in pieces of the given sizes, then the token ``z``."""

    stats = EngineStats()
    alive = True

    def __init__(self, pieces: Sequence[int], max_tokens: int) -> None:
        assert sum(pieces) == len(SCORES)
        self._pieces = pieces
        self._max_tokens = max_tokens

    async def submit(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        at = 0
        for number, size in enumerate(self._pieces, start=1):
            scores = tuple(
                TokenLogprobs(ord(PROMPT[place + 1]), SCORES[place], (), 1)
                for place in range(at, at + size)
            )
            at += size
            last = number == len(self._pieces)
            tokens = (ord("z"),) if last and self._max_tokens else ()
            yield RequestOutput(
                request.request_id,
                tokens,
                0,
                tuple(TokenLogprobs(token, -9.0, (), 1) for token in tokens),
                scores,
                FinishReason.LENGTH if last else None,
            )


def ask(pieces: Sequence[int], max_tokens: int, *, stream: bool) -> dict[int, dict[str, Any]]:
    """Text and logprobs of both choices."""

    async def run() -> dict[int, dict[str, Any]]:
        client: Any = ChunkedEngine(pieces, max_tokens)
        state: ServerState = new_state(ServerConfig(("m",)), client)
        text = byte_text(300)
        state.engine_ready(EngineInfo("m", 300, 64, 64, 4, (), {}), text)
        ids = [text.tokenizer.encode(letter)[0] for letter in PROMPT]
        body = CompletionRequest(
            model="m", prompt=ids, max_tokens=max_tokens, logprobs=0, echo=True, n=2
        )
        job = await completion_job(state, body, 0.0)
        found: dict[int, dict[str, Any]] = {}
        if not stream:
            answer = json.loads(await completion_answer(state, job, echo=True, top=0))
            return {choice["index"]: choice for choice in answer["choices"]}
        async for event in completion_events(state, job, echo=True, top=0):
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                whole = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
                whole["text"] += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    if values is not None:
                        whole["logprobs"].setdefault(name, []).extend(values)
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("pieces", [(7,), (1, 6), (6, 1), (2, 2, 3), (3, 4, 0)])
def test_every_score_is_at_its_token(
    pieces: tuple[int, ...], max_tokens: int, *, stream: bool
) -> None:
    choices = ask(pieces, max_tokens, stream=stream)
    assert set(choices) == {0, 1}
    for choice in choices.values():
        block = choice["logprobs"]
        assert block["token_logprobs"] == [None, *SCORES, *[-9.0] * max_tokens]
        assert choice["text"].startswith(PROMPT)
        assert len(block["tokens"]) == len(PROMPT) + max_tokens
        assert block["text_offset"] == list(range(len(PROMPT) + max_tokens))
