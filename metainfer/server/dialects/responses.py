"""``/v1/responses``: pieces as output items, with an event for every step of every item."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.responses import Response

from metainfer.core.errors import RequestError
from metainfer.server.dialects.responses_body import ResponsesRequest, chat_of
from metainfer.server.dialects.writer import Event, encoded, reply
from metainfer.server.prepare import Choice, Job, chat_job
from metainfer.server.reply import EventForm
from metainfer.server.state import ServerState
from metainfer.text.answer import Piece
from metainfer.text.calls import Call

_MESSAGE = ("message", "output_text")
_REASONING = ("reasoning", "reasoning_text")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


async def respond(state: ServerState, body: ResponsesRequest, arrived: float) -> Response:
    """The answer to `body`.

    Raises:
        RequestError: refused; the names in it are this dialect's.
    """
    chat, names = chat_of(body)
    try:
        job = await chat_job(state, chat, arrived, prefix="resp_")
    except RequestError as error:
        raise names.translated(error) from error
    return reply(state, job, ResponseWriter(body, job), FORM, stream=bool(body.stream))


def _failure(error: RequestError) -> bytes:
    """A stream that broke before its first event."""
    return encoded(
        {
            "type": "error",
            "code": error.code,
            "message": str(error),
            "param": error.param,
            "sequence_number": 0,
        }
    )


FORM = EventForm(b"", b": keep-alive\n\n", _failure)


class ResponseWriter:
    """One response. `answer` is the response object as it stands."""

    def __init__(self, body: ResponsesRequest, job: Job) -> None:
        self._job = job
        self._number = 0
        self._texts: list[str] = []  # of the item that is open
        self._kind: tuple[str, str] | None = None  # of the item that is open, and of its part
        self.answer: dict[str, Any] = _response(body, job)

    @property
    def _items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.answer["output"]
        return items

    def begin(self, choice: Choice) -> list[Event]:
        """The response as it begins, twice."""
        return [
            self._event(f"response.{name}", response=self.answer | {"output": []})
            for name in ("created", "in_progress")
        ]

    def push(self, piece: Piece) -> list[Event]:
        """What `piece` adds: text to an item, or whole items."""
        if isinstance(piece, Call):
            return [*self._close("completed"), *self._call(piece)]
        kind = _REASONING if piece.channel == "reasoning" else _MESSAGE
        events = []
        if kind != self._kind:
            events = [*self._close("completed"), *self._open(kind)]
        self._texts.append(piece.text)
        extra: dict[str, Any] = {"logprobs": []} if kind is _MESSAGE else {}
        events.append(self._part(f"response.{kind[1]}.delta", delta=piece.text, **extra))
        return events

    def end(self, choice: Choice) -> list[Event]:
        """The rest; ``incomplete`` where the answer was cut."""
        cut = choice.text.finish == "length"
        status = "incomplete" if cut else "completed"
        events = self._close(status)
        self.answer |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(self._job),
            "completed_at": None if cut else int(time.time()),
        }
        notes = [*self._job.notes, *choice.text.notes]
        if notes:
            self.answer["metainfer"] = {"notes": notes}
        return [*events, self._event(f"response.{status}", response=self.answer)]

    def fail(self, error: RequestError) -> list[Event]:
        """The response as far as it came, and why it stopped."""
        events = self._close("incomplete")
        self.answer |= {
            "status": "failed",
            "error": {"code": "server_error", "message": str(error)},
            "usage": _usage(self._job),
        }
        return [*events, self._event("response.failed", response=self.answer)]

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        place = len(self._items) - 1
        return self._event(kind, output_index=place, item_id=self._items[-1]["id"], **fields)

    def _part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)

    def _added(self, item: dict[str, Any]) -> Event:
        self._items.append(item)
        place = len(self._items) - 1
        return self._event("response.output_item.added", output_index=place, item=dict(item))

    def _done(self) -> Event:
        place = len(self._items) - 1
        return self._event("response.output_item.done", output_index=place, item=self._items[-1])

    def _open(self, kind: tuple[str, str]) -> list[Event]:
        self._kind, self._texts = kind, []
        item: dict[str, Any] = {"id": _id(kind[0]), "type": kind[0], "status": "in_progress"}
        if kind is _MESSAGE:
            item["role"] = "assistant"
        else:
            item["summary"] = []
        item["content"] = []
        added = self._added(item)
        return [added, self._part("response.content_part.added", part=_content(kind, ""))]

    def _close(self, status: str) -> list[Event]:
        if self._kind is None:
            return []
        kind, self._kind = self._kind, None
        text = "".join(self._texts)
        part = _content(kind, text)
        self._items[-1] |= {"status": status, "content": [part]}
        extra: dict[str, Any] = {"logprobs": []} if kind is _MESSAGE else {}
        return [
            self._part(f"response.{kind[1]}.done", text=text, **extra),
            self._part("response.content_part.done", part=part),
            self._done(),
        ]

    def _call(self, call: Call) -> list[Event]:
        item = {
            "id": _id("function_call"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": f"call_{uuid.uuid4().hex}",
            "name": call.name,
            "arguments": "",
        }
        events = [self._added(item)]
        item |= {"status": "completed", "arguments": call.arguments}
        name = "response.function_call_arguments"
        events += [
            self._of_item(f"{name}.delta", delta=call.arguments),
            self._of_item(f"{name}.done", name=call.name, arguments=call.arguments),
            self._done(),
        ]
        return events


def _id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def _content(kind: tuple[str, str], text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind[1], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind is _MESSAGE else part


def _usage(job: Job) -> dict[str, Any]:
    usage = job.usage
    reasoned = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": usage["total_tokens"],
    }


def _response(body: ResponsesRequest, job: Job) -> dict[str, Any]:
    """The response object before anything was said; what was asked for is told back."""
    form = None if body.text is None else body.text.format
    reasoning = body.reasoning
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": job.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if form is None else _shown(form)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _shown(form: Any) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {
        "type": form.type,
        "name": form.name or "schema",
        "schema": form.schema,
        "description": form.description,
        "strict": form.strict,
    }
