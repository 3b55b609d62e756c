"""Responses and Messages: whatever the cut into steps, the clients' own accumulators end with the
object that the answer in one piece is."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from fake_texts import VOCAB, byte_qwen
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from metainfer.core.errors import RequestError
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.core.step import RequestOutput
from metainfer.engine.model_text import TextTools, byte_deepseek
from metainfer.engine.text_stream import TextStream
from metainfer.server.dialects.messages import MessageWriter
from metainfer.server.dialects.messages_body import InputMessage, MessagesRequest
from metainfer.server.dialects.responses import ResponseWriter
from metainfer.server.dialects.responses_body import ResponsesRequest
from metainfer.server.dialects.writer import Event, Writer
from metainfer.server.prepare import Choice, Job
from metainfer.text.dialogue import Prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))

from transcripts import ALL, DSML, C, D, Opening, R, Transcript, tool_call

TEXTS = {"deepseek": byte_deepseek(VOCAB), "qwen": byte_qwen(VOCAB)}
LIMIT = 1000
MESSAGES = TypeAdapter(RawMessageStreamEvent)
RESPONSES = TypeAdapter(ResponseStreamEvent)


def job_of(tools: TextTools, opening: Opening, stops: Sequence[str] = ()) -> Job:
    params = SamplingParams(max_tokens=LIMIT)
    stream: TextStream = tools.answer_stream(
        stops, params, Prompt([1, 2, 3], opening), calls="read"
    )
    choice = Choice(0, 0, Request("r", (1, 2, 3), params), stream)
    return Job("id_1", 0.0, 1, "m", "fp", tools, [(1, 2, 3)], [choice])


def message_writer(job: Job) -> Writer:
    ask = [InputMessage(role="user", content="x")]
    return MessageWriter(MessagesRequest(model="m", max_tokens=LIMIT, messages=ask), job)


def response_writer(job: Job) -> Writer:
    return ResponseWriter(ResponsesRequest(model="m", input="x"), job)


WRITERS = {"messages": message_writer, "responses": response_writer}


def run(
    kind: str,
    job: Job,
    ids: Sequence[int],
    sizes: Sequence[int],
    finish: FinishReason,
) -> tuple[dict[str, Any], list[Event]]:
    """(the finished object, the events) of an answer that comes in steps of `sizes` tokens."""
    (choice,) = job.choices
    writer = WRITERS[kind](job)
    events = writer.begin(choice)
    at = 0
    for size in (*sizes, len(ids)):
        part = tuple(ids[at : at + size])
        over = at + len(part) == len(ids)
        output = RequestOutput("r", part, at, finish=finish if over else None, cached_tokens=2)
        at += len(part)
        delta = choice.text.push(output)
        for piece in delta.pieces:
            events += writer.push(piece)
        if delta.finish is not None:
            events += writer.end(choice)
            break
    return json.loads(msgspec.json.encode(writer.answer)), [
        json.loads(msgspec.json.encode(event)) for event in events
    ]


def without_ids(value: Any) -> Any:
    """Ids and times are drawn anew each time."""
    if isinstance(value, dict):
        return {
            name: without_ids(item)
            for name, item in value.items()
            if name not in ("id", "call_id", "completed_at", "created_at")
        }
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def from_messages(events: Sequence[Event]) -> Any:
    """What Anthropic's client ends with; its event order is insisted on."""
    snapshot, buffers = None, {}
    names = [event["type"] for event in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    open_block = None
    for event in events:
        typed = MESSAGES.validate_python(event)
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
            assert open_block == len(snapshot.content)
        elif event["type"].startswith("content_block"):
            assert event["index"] == open_block
            open_block = None if event["type"] == "content_block_stop" else open_block
        snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    assert open_block is None
    return snapshot


def from_responses(events: Sequence[Event]) -> dict[str, Any]:
    """What a client ends with that believes only deltas and done events; all must agree."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events[2:-1]:
        RESPONSES.validate_python(event)
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            items.append(event["item"])
            texts = []
            continue
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        if kind == "content_part.added":
            assert event["part"]["text"] == "" and event["content_index"] == 0
        elif kind.endswith(".delta"):
            texts.append(event["delta"])
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == "".join(texts)
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == "".join(texts)
            items[-1]["arguments"] = event["arguments"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == "".join(texts)
            items[-1]["content"] = [event["part"]]
        else:
            assert kind == "output_item.done"
            assert event["item"] | {"status": "in_progress"} == items[-1]
            items[-1] = event["item"]
    RESPONSES.validate_python(events[-1])
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == items
    return last


def check(
    tools: TextTools, opening: Opening, text: str, sizes: Sequence[int], finish: FinishReason
) -> None:
    ids = tools.tokenizer.encode(text, add_special=False)
    for kind in WRITERS:
        whole, _ = run(kind, job_of(tools, opening), ids, [], finish)
        answer, events = run(kind, job_of(tools, opening), ids, sizes, finish)
        assert without_ids(answer) == without_ids(whole)
        if kind == "messages":
            expected = Message.model_validate({**answer, "metainfer": None})
            got = from_messages(events)
            assert got.model_dump(exclude_none=True) == expected.model_dump(exclude_none=True)
        else:
            Response.model_validate(answer)
            assert from_responses(events) == answer


def family(case: Transcript) -> TextTools:
    return TEXTS["deepseek" if case in DSML else "qwen"]


@pytest.mark.parametrize("case", ALL, ids=[case.name for case in ALL])
def test_recorded_answers_in_every_cut(case: Transcript) -> None:
    tools = family(case)
    draw = random.Random(case.name)
    for finish in (FinishReason.STOP, FinishReason.LENGTH):
        for sizes in ([1] * 2000, [draw.randint(1, 9) for _ in range(500)]):
            check(tools, case.opening, case.text, sizes, finish)


PARTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "a", "é☃", "\n", "\n\n", " ", "<tool", "{", "x" * 20,
         tool_call("f", {"a": "é"}), tool_call("g", {}), f"<{D}"]
    ),
    max_size=9,
)  # fmt: skip


@given(
    PARTS,
    st.sampled_from(sorted(TEXTS)),
    st.sampled_from([R, C]),
    st.lists(st.integers(1, 40), max_size=20),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
@settings(max_examples=120, deadline=None)
def test_any_cut_gives_the_same_object(
    parts: list[str], name: str, opening: Opening, sizes: list[int], finish: FinishReason
) -> None:
    check(TEXTS[name], opening, "".join(parts), sizes, finish)


def test_blocks_stand_in_the_order_of_the_answer() -> None:
    text = f"hm</think>a{tool_call('f', {})}b{tool_call('g', {'n': 1.50})}"
    ids = TEXTS["qwen"].tokenizer.encode(text, add_special=False)
    message, _ = run("messages", job_of(TEXTS["qwen"], R), ids, [], FinishReason.STOP)
    assert [block["type"] for block in message["content"]] == [
        "thinking", "text", "tool_use", "text", "tool_use",
    ]  # fmt: skip
    assert (message["stop_reason"], message["content"][4]["input"]) == ("tool_use", {"n": 1.5})
    response, _ = run("responses", job_of(TEXTS["qwen"], R), ids, [], FinishReason.STOP)
    assert [item["type"] for item in response["output"]] == [
        "reasoning", "message", "function_call", "message", "function_call",
    ]  # fmt: skip
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert response["output"][4]["arguments"] == '{"n": 1.5}'


@pytest.mark.parametrize(
    ("finish", "stops", "limit", "said", "sequence"),
    [
        (FinishReason.STOP, [], LIMIT, "end_turn", None),
        (FinishReason.STOP, ["never", "b c"], LIMIT, "stop_sequence", "b c"),
        (FinishReason.LENGTH, [], LIMIT, "max_tokens", None),
        (FinishReason.LENGTH, [], LIMIT + 1, "model_context_window_exceeded", None),
    ],
)
def test_why_a_message_ends(
    finish: FinishReason, stops: list[str], limit: int, said: str, sequence: str | None
) -> None:
    job = job_of(TEXTS["qwen"], C, stops)
    writer = message_writer(job)
    writer._max_tokens = limit  # type: ignore[attr-defined]
    (choice,) = job.choices
    ids = tuple(TEXTS["qwen"].tokenizer.encode("a b c d", add_special=False))
    choice.text.push(RequestOutput("r", ids, 0, finish=finish))
    writer.end(choice)
    assert (writer.answer["stop_reason"], writer.answer["stop_sequence"]) == (said, sequence)


def test_a_cut_response_says_what_it_lacks() -> None:
    ids = TEXTS["qwen"].tokenizer.encode("a</think>b", add_special=False)
    answer, events = run("responses", job_of(TEXTS["qwen"], R), ids, [1] * 99, FinishReason.LENGTH)
    assert answer["status"] == "incomplete" and answer["completed_at"] is None
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    assert events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_an_answer_that_breaks_off_says_so(kind: str) -> None:
    job = job_of(TEXTS["qwen"], C)
    (choice,) = job.choices
    writer = WRITERS[kind](job)
    events = writer.begin(choice)
    for piece in choice.text.push(RequestOutput("r", (100, 101, 102), 0)).pieces:
        events += writer.push(piece)
    events += writer.fail(RequestError("It broke.", status=500, code="engine_error"))
    if kind == "messages":
        assert events[-1] == {
            "type": "error", "error": {"type": "api_error", "message": "It broke."}
        }  # fmt: skip
        return
    for event in events:
        RESPONSES.validate_python(json.loads(msgspec.json.encode(event)))
    names = [event["type"] for event in events]
    assert names[-2:] == ["response.output_item.done", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "It broke."}
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    assert all(
        later["sequence_number"] == earlier["sequence_number"] + 1
        for earlier, later in itertools.pairwise(events)
    )
