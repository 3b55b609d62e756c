"""``/v1/messages`` and its token count: pieces as content blocks, one after the other."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from starlette.responses import Response

from metainfer.core.errors import RequestError
from metainfer.server.dialects.messages_body import CountTokensRequest, MessagesRequest, chat_of
from metainfer.server.dialects.writer import Event, encoded, reply
from metainfer.server.dialogue import conversation_of, size_of
from metainfer.server.errors import anthropic_body
from metainfer.server.prepare import Choice, Job, chat_job, check_model, off_loop
from metainfer.server.reply import EventForm
from metainfer.server.state import ServerState
from metainfer.text.answer import Piece
from metainfer.text.calls import Call

FORM = EventForm(b"", encoded({"type": "ping"}), lambda error: encoded(anthropic_body(error)))

#: channel of a piece -> (type of its block and name of its text, type of a delta)
_BLOCKS = {"content": ("text", "text_delta"), "reasoning": ("thinking", "thinking_delta")}


async def respond(state: ServerState, body: MessagesRequest, arrived: float) -> Response:
    """The answer to `body`.

    Raises:
        RequestError: refused; the names in it are this dialect's.
    """
    chat, names = chat_of(body)
    try:
        job = await chat_job(state, chat, arrived, prefix="msg_", fit=True)
    except RequestError as error:
        raise names.translated(error) from error
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        job.notes += ("thinking_budget_not_enforced",)
    return reply(state, job, MessageWriter(body, job), FORM, stream=bool(body.stream))


async def count_tokens(state: ServerState, body: CountTokensRequest) -> Response:
    """How many tokens the prompt of `body` has.

    Raises:
        RequestError: refused; the names in it are this dialect's.
    """
    _, text = state.serving()
    check_model(state.config, body.model)
    chat, names = chat_of(body)
    try:
        state.config.bounds.check(chat)
        conversation = conversation_of(text, chat)
        prompt = await off_loop(size_of(chat), lambda: text.format.encode(conversation))
    except RequestError as error:
        raise names.translated(error) from error
    return Response(
        msgspec.json.encode({"input_tokens": len(prompt.ids)}), media_type="application/json"
    )


class MessageWriter:
    """One message. `answer` is the message object as it stands."""

    def __init__(self, body: MessagesRequest, job: Job) -> None:
        self._job = job
        self._max_tokens = body.max_tokens
        self._texts: list[str] = []  # of the block that is open
        self._open: str | None = None  # its channel
        self.answer: dict[str, Any] = {
            "id": job.id,
            "type": "message",
            "role": "assistant",
            "model": job.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }

    def begin(self, choice: Choice) -> list[Event]:
        """The message without content; what the prompt took is known."""
        usage = self._usage(choice) | {"output_tokens": 0}
        message = self.answer | {"content": [], "usage": usage}
        return [{"type": "message_start", "message": message}]

    def push(self, piece: Piece) -> list[Event]:
        """What `piece` adds: text to a block, or a whole block."""
        if isinstance(piece, Call):
            return [*self._close(), *self._call(piece)]
        kind, delta = _BLOCKS[piece.channel]
        events = []
        if piece.channel != self._open:
            events = self._close()
            self._open, self._texts = piece.channel, []
            block = {"type": kind, kind: ""}
            events += self._start(block | {"signature": ""} if kind == "thinking" else block)
        self._texts.append(piece.text)
        return [*events, self._delta({"type": delta, kind: piece.text})]

    def end(self, choice: Choice) -> list[Event]:
        """Why it ended, and what it took."""
        events = self._close()
        reason, sequence = self._stop(choice)
        usage = self._usage(choice)
        self.answer |= {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}
        delta: Event = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage,
        }
        notes = [*self._job.notes, *choice.text.notes]
        if notes:
            self.answer["metainfer"] = delta["metainfer"] = {"notes": notes}
        return [*events, delta, {"type": "message_stop"}]

    def fail(self, error: RequestError) -> list[Event]:
        """Why it broke off."""
        return [dict(anthropic_body(error))]

    def _start(self, block: dict[str, Any]) -> list[Event]:
        self.answer["content"].append(block)
        place = len(self.answer["content"]) - 1
        return [{"type": "content_block_start", "index": place, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        place = len(self.answer["content"]) - 1
        return {"type": "content_block_delta", "index": place, "delta": delta}

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        kind, self._open = _BLOCKS[self._open][0], None
        self.answer["content"][-1][kind] = "".join(self._texts)
        # Nobody signs here, but clients wait for a signature before a thinking block's end.
        signed = [self._delta({"type": "signature_delta", "signature": ""})]
        return [*(signed if kind == "thinking" else ()), self._stopped()]

    def _stopped(self) -> Event:
        return {"type": "content_block_stop", "index": len(self.answer["content"]) - 1}

    def _call(self, call: Call) -> list[Event]:
        block: dict[str, Any] = {
            "type": "tool_use",
            "id": f"toolu_{uuid.uuid4().hex}",
            "name": call.name,
            "input": {},
        }
        started = self._start(block)
        block["input"] = msgspec.Raw(call.arguments.encode())
        arguments = self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return [*started, arguments, self._stopped()]

    def _stop(self, choice: Choice) -> tuple[str, str | None]:
        if choice.text.finish == "tool_calls":
            return "tool_use", None
        if choice.text.finish == "length":
            whole = choice.request.params.max_tokens == self._max_tokens
            return "max_tokens" if whole else "model_context_window_exceeded", None
        sequence = choice.text.stop_string
        return "end_turn" if sequence is None else "stop_sequence", sequence

    def _usage(self, choice: Choice) -> dict[str, Any]:
        usage = self._job.usage
        cached = choice.text.cached_tokens
        counts = {
            "input_tokens": usage["prompt_tokens"] - cached,  # Anthropic counts cached ones apart
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
        if "completion_tokens_details" in usage:
            thought = usage["completion_tokens_details"]["reasoning_tokens"]
            counts["output_tokens_details"] = {"thinking_tokens": thought}
        return counts
