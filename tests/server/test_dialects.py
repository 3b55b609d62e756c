"""Responses and Messages through a real server over the fake engine: forms, statuses, ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from fake_server import (
    Answer,
    Running,
    call,
    fake_server,
    is_anthropic_error,
    is_error_body,
)
from fake_texts import write_script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))

from transcripts import tool_call

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TYPES: dict[str, tuple[Any, Any]] = {
    RESPONSES: (Response, TypeAdapter(ResponseStreamEvent)),
    MESSAGES: (Message, TypeAdapter(RawMessageStreamEvent)),
}
SAID = {
    "call": "<think>\nhm\n</think>\n\nYes.\n" + tool_call("f", {"a": "é"}),
    "two": tool_call("f", {}) + "\n" + tool_call("f", {"b": [1]}),
    "plain": "Just text",
    "stop": "one END two",
}


def body(path: str, text: str, **extra: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"model": "fake", "input": text, **extra}
    limit = {} if path == COUNT else {"max_tokens": 400}
    messages = [{"role": "user", "content": text}]
    return {"model": "fake", "messages": messages} | limit | extra


def tools(path: str) -> list[dict[str, Any]]:
    schema = {"type": "object"}
    if path == RESPONSES:
        return [{"type": "function", "name": "f", "parameters": schema}]
    return [{"name": "f", "input_schema": schema}]


def named_events(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each event; comments are skipped, anything else is an error."""
    found = []
    for block in raw.decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][0] == found[-1][1]["type"]
    return found


def ask(running: Running, path: str, given: dict[str, Any]) -> dict[str, Any]:
    """The answer, asked for in both ways; the clients' types read every event."""
    kind, event_kind = TYPES[path]
    answer = call(running.port, "POST", path, given)
    assert answer.status == 200, answer.raw
    kind.model_validate(answer.json)
    streamed = call(running.port, "POST", path, given | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = named_events(streamed.raw)
    for _, data in events:
        event_kind.validate_python(data)
    if path == RESPONSES:
        last = events[-1][1]["response"]
        for name in ("status", "usage", "incomplete_details", "tools", "metadata", "store"):
            assert last[name] == answer.json[name]
        assert len(last["output"]) == len(answer.json["output"])
    else:
        assert events[-1][0] == "message_stop"
        assert events[-2][1]["usage"] == answer.json["usage"]
        assert events[-2][1]["delta"]["stop_reason"] == answer.json["stop_reason"]
    result: dict[str, Any] = answer.json
    return result


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: Any) -> Iterator[Running]:
    script = write_script(tmp_path_factory.mktemp("s") / "script.json", "qwen", SAID)
    steps = ["--script", str(script), "--tokens-per-step", "3"]
    with fake_server(["--text", "qwen"], steps) as running:
        yield running


def test_reasoning_text_and_calls(qwen: Running) -> None:
    got = ask(qwen, RESPONSES, body(RESPONSES, "play:call;", tools=tools(RESPONSES), store=True))
    reasoning, message, made = got["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Yes."
    assert (made["name"], made["arguments"]) == ("f", '{"a": "é"}')
    assert got["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert got["store"] is False
    thinking = {"type": "enabled", "budget_tokens": 1024}
    got = ask(
        qwen, MESSAGES, body(MESSAGES, "play:call;", tools=tools(MESSAGES), thinking=thinking)
    )
    assert [block["type"] for block in got["content"]] == ["thinking", "text", "tool_use"]
    assert got["content"][2]["input"] == {"a": "é"}
    assert got["stop_reason"] == "tool_use"
    assert got["metainfer"] == {"notes": ["thinking_budget_not_enforced"]}
    # What came back can be sent back.
    result = {"type": "tool_result", "tool_use_id": got["content"][2]["id"], "content": "so"}
    again = body(MESSAGES, "play:call;", tools=tools(MESSAGES))
    again["messages"] += [
        {"role": "assistant", "content": got["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "play:plain;"}]},
    ]
    assert ask(qwen, MESSAGES, again)["content"] == [{"type": "text", "text": "Just text"}]


def test_one_call_at_a_time(qwen: Running) -> None:
    many = body(RESPONSES, "play:two;", tools=tools(RESPONSES))
    assert len(ask(qwen, RESPONSES, many)["output"]) == 2
    assert len(ask(qwen, RESPONSES, many | {"parallel_tool_calls": False})["output"]) == 1
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = body(MESSAGES, "play:two;", tools=tools(MESSAGES), tool_choice=choice)
    got = ask(qwen, MESSAGES, one)
    assert len(got["content"]) == 1 and got["stop_reason"] == "tool_use"


def test_the_prompt_without_thinking_closes_it(qwen: Running) -> None:
    off = call(qwen.port, "POST", COUNT, body(COUNT, "play:plain;")).json
    on = {"thinking": {"type": "adaptive"}}
    on_count = call(qwen.port, "POST", COUNT, body(COUNT, "play:plain;", **on)).json
    MessageTokensCount.model_validate(off)
    assert off["input_tokens"] > on_count["input_tokens"]  # the closed tags are written


def test_ends(server: Running, qwen: Running) -> None:
    got = ask(qwen, MESSAGES, body(MESSAGES, "play:stop;", stop_sequences=["x", "END"]))
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "END")
    assert got["content"] == [{"type": "text", "text": "one "}]
    got = ask(server, MESSAGES, body(MESSAGES, "go on", max_tokens=5))
    assert got["stop_reason"] == "max_tokens" and got["usage"]["output_tokens"] == 5
    got = ask(server, MESSAGES, body(MESSAGES, "go on", max_tokens=10**6))
    assert got["stop_reason"] == "model_context_window_exceeded"
    got = ask(server, RESPONSES, body(RESPONSES, "go on", max_output_tokens=5))
    assert got["status"] == "incomplete"
    assert got["output"][0]["status"] == "incomplete"
    got = ask(server, RESPONSES, body(RESPONSES, "say:"))
    assert (got["status"], got["output"]) == ("completed", [])


def test_tokens_are_counted_as_they_are_used(server: Running) -> None:
    text = "say:" + "ß" * 40
    count = call(server.port, "POST", COUNT, body(COUNT, text, system="Be brief.")).json
    usage = ask(server, MESSAGES, body(MESSAGES, text, system="Be brief."))["usage"]
    assert usage["cache_read_input_tokens"] > 0
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    chat = {"model": "fake", "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]}  # fmt: skip
    tokens = call(server.port, "POST", "/tokenize", chat).json["count"]
    assert tokens == count["input_tokens"]
    given = ask(server, RESPONSES, body(RESPONSES, text, instructions="Be brief."))["usage"]
    assert given["input_tokens"] == tokens
    assert given["total_tokens"] == tokens + given["output_tokens"]


def test_a_stream_that_breaks_off(server: Running) -> None:
    """The fake engine ends this one with an error at its third token."""
    raw = call(server.port, "POST", RESPONSES, body(RESPONSES, "fail:", stream=True)).raw
    names = [name for name, _ in named_events(raw)]
    assert names[0] == "response.created" and names[-1] == "response.failed"
    raw = call(server.port, "POST", MESSAGES, body(MESSAGES, "fail:", stream=True)).raw
    *_, (name, data) = named_events(raw)
    assert name == "error" and data["error"]["type"] == "api_error"
    for path in (RESPONSES, MESSAGES):
        answer = call(server.port, "POST", path, body(path, "fail:"))
        assert answer.status == 500 and form_of(path, answer)


def test_an_idle_stream_is_kept_open() -> None:
    with fake_server(["--keep-alive", "0.04"], ["--step-ms", "400"]) as running:
        for path, beat in ((MESSAGES, b"event: ping\n"), (RESPONSES, b": keep-alive\n")):
            limit = {"max_tokens": 2} if path == MESSAGES else {"max_output_tokens": 2}
            raw = call(running.port, "POST", path, body(path, "x", stream=True) | limit).raw
            assert beat in raw
            if path == MESSAGES:
                assert [n for n, _ in named_events(raw) if n != "ping"][-1] == "message_stop"


def form_of(path: str, answer: Answer) -> bool:
    anthropic = path.startswith(MESSAGES)
    return is_anthropic_error(answer.json) if anthropic else is_error_body(answer.json)


def kind_of(answer: Answer) -> str:
    kind = str(answer.json["error"]["type"])
    if kind != "request_too_large":  # documented for 413; the client's types lag
        ErrorResponse.model_validate(answer.json)
    return kind


def test_anthropics_errors_have_their_types_and_statuses(server: Running) -> None:
    port = server.port
    good = json.dumps(body(MESSAGES, "x")).encode()
    plain = {"content-type": "text/plain"}
    for answer, status, kind in (
        (call(port, "POST", MESSAGES, b"{"), 400, "invalid_request_error"),
        (call(port, "POST", MESSAGES, body(MESSAGES, "x" * 3000)), 400, "invalid_request_error"),
        (call(port, "POST", MESSAGES, body(MESSAGES, "x") | {"model": "no"}), 404,
         "not_found_error"),
        (call(port, "POST", COUNT, body(COUNT, "x") | {"model": "no"}), 404, "not_found_error"),
        (call(port, "GET", "/v1/messages/batches"), 404, "not_found_error"),
        (call(port, "GET", MESSAGES), 405, "invalid_request_error"),
        (call(port, "POST", MESSAGES, b" " * (4 * 2**20 + 1)), 413, "request_too_large"),
        (call(port, "POST", MESSAGES, good, plain), 415, "invalid_request_error"),
    ):  # fmt: skip
        assert (answer.status, kind_of(answer)) == (status, kind), answer.raw
        assert is_anthropic_error(answer.json)
    assert is_error_body(call(port, "GET", "/v1/messagesx").json)


def test_full_and_loading() -> None:
    with fake_server(engine=["--max-running", "0"]) as running:
        for path in (MESSAGES, RESPONSES):
            for stream in (False, True):
                full = call(running.port, "POST", path, body(path, "x", stream=stream))
                assert full.status == 429 and full.headers["retry-after"] == "2"
                assert form_of(path, full)
                assert full.json["error"]["type"] == "rate_limit_error"
    with fake_server(engine=["--hang-at-start"], ready=False) as running:
        for path in (MESSAGES, RESPONSES, COUNT):
            early = call(running.port, "POST", path, body(path, "x"))
            assert early.status == 503 and early.headers["retry-after"]
            assert form_of(path, early)
            if path != RESPONSES:
                assert kind_of(early) == "overloaded_error"


def test_refusals_of_the_core_are_in_the_clients_words(server: Running) -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "y"},
    ]
    answer = call(server.port, "POST", RESPONSES, {"model": "fake", "input": items})
    assert answer.status == 400 and answer.json["error"]["param"] == "input[1].call_id"
    answer = call(server.port, "POST", RESPONSES, body(RESPONSES, "x", tools=tools(RESPONSES)))
    assert answer.json["error"]["code"] == "unsupported_parameter"
    result = [{"type": "tool_result", "tool_use_id": "1", "content": "y"}]
    given = body(MESSAGES, "x")
    given["messages"].append({"role": "user", "content": result})
    message = call(server.port, "POST", MESSAGES, given).json["error"]["message"]
    assert message.startswith("messages[1].content[0].tool_use_id '1' is no call of the answer")
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
    error = call(server.port, "POST", RESPONSES, body(RESPONSES, "x") | {"text": form}).json[
        "error"
    ]
    assert (error["code"], error["param"]) == ("invalid_schema", "text.format.schema")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["input", "messages", "instructions", "system", "tools", "tool_choice", "thinking", "text",
     "stop_sequences", "top_k", "max_tokens", "stream", "metadata", "reasoning", "output_config",
     "temperature", "chat_template_kwargs", "cache_salt", "store"]
)  # fmt: skip


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.sampled_from([RESPONSES, MESSAGES, COUNT]), st.dictionaries(NAMES, JUNK, max_size=3))
def test_no_body_makes_a_server_error(server: Running, path: str, changes: Any) -> None:
    base = body(path, "say:x")
    answer = call(server.port, "POST", path, json.dumps(base | changes).encode())
    assert answer.status < 500 and answer.status != 422, answer.raw
    assert answer.status == 200 or form_of(path, answer)


def test_the_operators_bounds_hold_in_the_clients_words() -> None:
    """`--limit` of the core, as chat has it."""
    with fake_server(["--limit", "stop=1", "--limit", "messages=2"]) as running:
        given = body(MESSAGES, "x", stop_sequences=["a", "b"])
        error = call(running.port, "POST", MESSAGES, given).json["error"]
        assert error["message"].startswith("stop_sequences: ")
        many = [{"role": "user", "content": "x"}] * 3
        error = call(running.port, "POST", RESPONSES, {"model": "fake", "input": many}).json[
            "error"
        ]
        assert error["param"] == "input"
        for path in (MESSAGES, COUNT):
            answer = call(running.port, "POST", path, body(path, "x") | {"messages": many})
            assert answer.status == 400 and is_anthropic_error(answer.json)
        schemas = call(running.port, "GET", "/openapi.json").json["components"]["schemas"]
        items = schemas["ResponsesRequest"]["properties"]["input"]["anyOf"]
        assert [item["maxItems"] for item in items if item["type"] == "array"] == [2]
