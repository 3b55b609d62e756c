"""``/v1/completions``: deltas as events, or one answer; `echo` puts the prompt in front."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from metainfer.core.step import TokenLogprobs
from metainfer.engine.text_stream import Delta, LegacyLogprobs
from metainfer.server.generate import deltas
from metainfer.server.prepare import Choice, Job
from metainfer.server.state import ServerState


class _ChunkChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[_ChunkChoice, ...]
    usage: dict[str, Any] | UnsetType | None = UNSET
    object: str = "text_completion"


_encode = msgspec.json.Encoder().encode


class _Formatter:
    """Text and log-probability blocks of every choice, with the offsets of `echo`."""

    def __init__(self, job: Job, *, echo: bool, top: int | None) -> None:
        self._job = job
        self._top = top
        self._echoed: set[int] = set()
        self._scores: dict[int, list[TokenLogprobs]] = {}  # of prompts, until they are echoed
        self._base = dict.fromkeys(range(len(job.choices)), 0)
        self._echo = echo
        decode = job.tools.tokenizer.decode
        self._prompts = [decode(ids, skip_special=False) for ids in job.prompts] if echo else []

    def format(self, choice: Choice, delta: Delta) -> tuple[str, LegacyLogprobs | None]:
        """The text and the block that `delta` adds.

        An echo waits for the end of the prompt, whose scores come with each of its chunks.
        """
        text = delta.text
        if self._echo and choice.index not in self._echoed:
            self._scores.setdefault(choice.index, []).extend(delta.prompt_logprobs)
            if not delta.tokens and delta.finish is None:
                return "", None
        block = None if self._top is None else LegacyLogprobs()
        if block is not None and not self._top:
            block.top_logprobs = None
        if self._echo and choice.index not in self._echoed:
            self._echoed.add(choice.index)
            prompt = self._prompts[choice.prompt]
            if block is not None:
                self._prompt_block(block, choice)
            del self._scores[choice.index]
            self._base[choice.index] = len(prompt)
            text = prompt + text
        if block is not None:
            self._add(block, choice, delta)
        return text, block

    def _add(self, block: LegacyLogprobs, choice: Choice, delta: Delta) -> None:
        base = self._base[choice.index]
        for entry, start in zip(delta.logprobs, delta.starts, strict=True):
            block.add(
                self._job.tools.tokenizer,
                entry,
                token=entry.token,
                offset=base + start,
                top=self._top or 0,
            )

    def _prompt_block(self, block: LegacyLogprobs, choice: Choice) -> None:
        tokenizer = self._job.tools.tokenizer
        ids = self._job.prompts[choice.prompt]
        # The engine may leave out the first token, which has no log-probability.
        scores = self._scores[choice.index]
        entries: list[TokenLogprobs | None] = [*[None] * (len(ids) - len(scores)), *scores]
        offset = 0
        for place, (token, entry) in enumerate(zip(ids, entries, strict=True)):
            known = entry if place else None
            block.add(tokenizer, known, token=token, offset=offset, top=self._top or 0)
            offset += len(tokenizer.token_text(token))


async def completion_events(
    state: ServerState, job: Job, *, echo: bool, top: int | None
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a streamed answer, without the closing ``[DONE]``."""
    formatter = _Formatter(job, echo=echo, top=top)
    async with aclosing(deltas(state, job)) as items:
        async for choice, delta in items:
            text, block = formatter.format(choice, delta)
            if not text and delta.finish is None and not delta.logprobs:
                continue
            usage: dict[str, Any] | UnsetType | None = UNSET
            if job.usage_always:
                usage = job.usage
            elif job.usage_at_end:
                usage = None
            part = _ChunkChoice(choice.index, text, block, delta.finish)
            chunk = _Chunk(job.id, job.created, job.model, job.fingerprint, (part,), usage)
            yield b"data: " + _encode(chunk) + b"\n\n"
    if job.usage_at_end:
        last = _Chunk(job.id, job.created, job.model, job.fingerprint, (), job.usage)
        yield b"data: " + _encode(last) + b"\n\n"


async def completion_answer(state: ServerState, job: Job, *, echo: bool, top: int | None) -> bytes:
    """The body of an answer in one piece."""
    formatter = _Formatter(job, echo=echo, top=top)
    texts: list[list[str]] = [[] for _ in job.choices]
    blocks = [LegacyLogprobs() for _ in job.choices]
    for block in blocks:
        block.top_logprobs = [] if top else None
    async with aclosing(deltas(state, job)) as items:
        async for choice, delta in items:
            text, part = formatter.format(choice, delta)
            texts[choice.index].append(text)
            if part is not None:
                blocks[choice.index].extend(part)
    choices = [
        {
            "index": choice.index,
            "text": "".join(texts[choice.index]),
            "logprobs": None if top is None else blocks[choice.index],
            "finish_reason": choice.text.finish,
        }
        for choice in job.choices
    ]
    return _encode(
        {
            "id": job.id,
            "object": "text_completion",
            "created": job.created,
            "model": job.model,
            "system_fingerprint": job.fingerprint,
            "choices": choices,
            "usage": job.usage,
        }
    )
