"""``/v1/chat/completions``: deltas as chunk events, or one answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from metainfer.engine.text_stream import Delta, chat_logprobs
from metainfer.server.generate import deltas
from metainfer.server.prepare import Choice, Job
from metainfer.server.state import ServerState


class _DeltaBody(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _DeltaBody
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[_ChunkChoice, ...]
    usage: dict[str, Any] | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


_encode = msgspec.json.Encoder().encode


async def chat_events(state: ServerState, job: Job, top: int) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a streamed answer, without the closing ``[DONE]``."""
    begun: set[int] = set()

    def event(choice: int, body: _DeltaBody, **extra: Any) -> bytes:
        usage: dict[str, Any] | UnsetType | None = UNSET
        if job.usage_always:
            usage = job.usage
        elif job.usage_at_end:
            usage = None
        chunk = _Chunk(
            job.id,
            job.created,
            job.model,
            job.fingerprint,
            (_ChunkChoice(choice, body, **extra),),
            usage,
        )
        return b"data: " + _encode(chunk) + b"\n\n"

    async with aclosing(deltas(state, job)) as items:
        async for choice, delta in items:
            data = b""
            index = choice.index
            if index not in begun:
                begun.add(index)
                data = event(index, _DeltaBody("assistant", ""))
            if delta.text or delta.logprobs:
                data += event(
                    index, _DeltaBody(content=delta.text), logprobs=_block(job, delta, top)
                )
            if delta.finish is not None:
                data += event(index, _DeltaBody(), finish_reason=delta.finish)
            if data:
                yield data
    if job.usage_at_end:
        last = _Chunk(job.id, job.created, job.model, job.fingerprint, (), job.usage)
        yield b"data: " + _encode(last) + b"\n\n"


def _block(job: Job, delta: Delta, top: int) -> dict[str, Any] | None:
    if not delta.logprobs:
        return None
    content = chat_logprobs(job.tools.tokenizer, delta.logprobs, top)
    return {"content": content, "refusal": None}


async def chat_answer(state: ServerState, job: Job, top: int) -> bytes:
    """The body of an answer in one piece."""
    texts: list[list[str]] = [[] for _ in job.choices]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in job.choices]
    async with aclosing(deltas(state, job)) as items:
        async for choice, delta in items:
            texts[choice.index].append(delta.text)
            logprobs[choice.index] += chat_logprobs(job.tools.tokenizer, delta.logprobs, top)

    def body(choice: Choice) -> dict[str, Any]:
        wanted = choice.request.params.logprobs is not None
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": "".join(texts[choice.index]),
                "refusal": None,
            },
            "logprobs": {"content": logprobs[choice.index], "refusal": None} if wanted else None,
            "finish_reason": choice.text.finish,
        }

    return _encode(
        {
            "id": job.id,
            "object": "chat.completion",
            "created": job.created,
            "model": job.model,
            "system_fingerprint": job.fingerprint,
            "choices": [body(choice) for choice in job.choices],
            "usage": job.usage,
        }
    )
