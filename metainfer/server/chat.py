"""``/v1/chat/completions``: deltas as chunk events, or one answer."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from metainfer.engine.text_stream import Delta, chat_logprobs
from metainfer.server.generate import deltas
from metainfer.server.prepare import Choice, Job
from metainfer.server.state import ServerState
from metainfer.text.calls import Call


class _DeltaBody(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    # One text under both names that clients look for.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _DeltaBody
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    metainfer: dict[str, Any] | UnsetType = UNSET


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
    called = [0] * len(job.choices)

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
            text, reasoning, whole = delta.channels
            if text or reasoning or delta.logprobs:
                body = _DeltaBody(content=text)
                if reasoning:
                    body = _DeltaBody(
                        content=text or UNSET, reasoning_content=reasoning, reasoning=reasoning
                    )
                data += event(index, body, logprobs=_block(job, delta, top))
            for call in whole:
                for part in _call_parts(called[index], call):
                    data += event(index, _DeltaBody(tool_calls=[part]))
                called[index] += 1
            if delta.finish is not None:
                data += event(
                    index, _DeltaBody(), finish_reason=delta.finish, metainfer=_remarks(job, choice)
                )
            if data:
                yield data
    if job.usage_at_end:
        last = _Chunk(job.id, job.created, job.model, job.fingerprint, (), job.usage)
        yield b"data: " + _encode(last) + b"\n\n"


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _call_parts(index: int, call: Call) -> list[dict[str, Any]]:
    """Deltas of one call: id and name first, then its arguments."""
    head = {"index": index, **_call(call)}
    head["function"] = {"name": call.name, "arguments": ""}
    return [head, {"index": index, "function": {"arguments": call.arguments}}]


def _remarks(job: Job, choice: Choice) -> dict[str, Any] | UnsetType:
    """What was not as it should be: of the request, then of the answer (`AnswerParser.notes`)."""
    notes = [*job.notes, *choice.text.notes]
    return {"notes": notes} if notes else UNSET


def _block(job: Job, delta: Delta, top: int) -> dict[str, Any] | None:
    if not delta.logprobs:
        return None
    content = chat_logprobs(job.tools.tokenizer, delta.logprobs, top)
    return {"content": content, "refusal": None}


async def chat_answer(state: ServerState, job: Job, top: int) -> bytes:
    """The body of an answer in one piece."""
    texts: list[list[str]] = [[] for _ in job.choices]
    thoughts: list[list[str]] = [[] for _ in job.choices]
    calls: list[list[Call]] = [[] for _ in job.choices]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in job.choices]
    async with aclosing(deltas(state, job)) as items:
        async for choice, delta in items:
            text, reasoning, whole = delta.channels
            texts[choice.index].append(text)
            thoughts[choice.index].append(reasoning)
            calls[choice.index] += whole
            logprobs[choice.index] += chat_logprobs(job.tools.tokenizer, delta.logprobs, top)

    def body(choice: Choice) -> dict[str, Any]:
        wanted = choice.request.params.logprobs is not None
        content = "".join(texts[choice.index])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if job.tools.format.markup.think is not None:
            reasoning = "".join(thoughts[choice.index]) or None
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls[choice.index]:
            message["content"] = content or None
            message["tool_calls"] = list(map(_call, calls[choice.index]))
        answer = {
            "index": choice.index,
            "message": message,
            "logprobs": {"content": logprobs[choice.index], "refusal": None} if wanted else None,
            "finish_reason": choice.text.finish,
        }
        remarks = _remarks(job, choice)
        return answer if remarks is UNSET else answer | {"metainfer": remarks}

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
