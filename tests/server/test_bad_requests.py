"""Whatever a client sends, the answer is a 4xx in OpenAI's form, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_server import Running, call, chat_body, is_error_body
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHAT = "/v1/chat/completions"
LEGACY = "/v1/completions"


def raw(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


GOOD = json.dumps(chat_body("hi"))

BODIES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "invalid_json"),
    ("not json", b"{", "invalid_json"),
    ("list", b"[]", "invalid_json"),
    ("null", b"null", "invalid_json"),
    ("number", b"1", "invalid_json"),
    ("trailing", raw(GOOD + "x"), "invalid_json"),
    ("two documents", raw(GOOD + GOOD), "invalid_json"),
    ("bom", b"\xef\xbb\xbf" + raw(GOOD), "invalid_json"),
    ("utf-16", GOOD.encode("utf-16"), "invalid_json"),
    ("bad utf-8", raw(GOOD).replace(b"hi", b"h\xff"), "invalid_json"),
    ("cut utf-8", raw(GOOD).replace(b"hi", b"\xe2\x98"), "invalid_json"),
    ("lone surrogate", raw(GOOD.replace("hi", "\\ud800")), "invalid_json"),
    ("surrogate in model", raw(GOOD.replace("fake", "\\udfff")), "invalid_json"),
    ("NaN", raw(GOOD[:-1] + ', "temperature": NaN}'), "invalid_json"),
    ("Infinity", raw(GOOD[:-1] + ', "temperature": -Infinity}'), "invalid_json"),
    ("huge float", raw(GOOD[:-1] + ', "temperature": 1e999}'), "invalid_value"),
    ("huge int", raw(GOOD[:-1] + ', "seed": ' + "9" * 5000 + "}"), "invalid_json"),
    ("duplicate key", raw(GOOD[:-1] + ', "model": "fake"}'), "invalid_json"),
    ("duplicate inside", raw(GOOD.replace('"role": "user"', '"role": "user", "role": "user"')),
     "invalid_json"),
    ("deep", raw(GOOD[:-1] + ', "messages2": ' + "[" * 200_000 + "]" * 200_000 + "}"),
     "invalid_json"),
    ("deep objects", raw('{"a":' * 100_000 + "1" + "}" * 100_000), "invalid_json"),
    ("control character", raw(GOOD.replace("hi", "\x01")), "invalid_json"),
    ("single quotes", b"{'model': 'fake'}", "invalid_json"),
]  # fmt: skip

FIELDS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": None}, "invalid_type", "model"),
    ({"model": 3}, "invalid_type", "model"),
    ({"model": "x" * 5000}, "model_not_found", "model"),
    ({"messages": None}, "invalid_type", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": {}}, "invalid_type", "messages"),
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
    ({"messages": [{}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 1}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
     "invalid_value", "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x"}]},
     "missing_required_parameter", "messages[0].tool_call_id"),
    ({"messages": [{"role": "function", "content": "x"}]},
     "unsupported_parameter", "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
     "invalid_type", "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]},
     "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]},
     "unknown_parameter", "messages[0].nmae"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "unsupported_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x"}] * 4097}, "invalid_value", "messages"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"temperature": "1"}, "invalid_type", "temperature"),
    ({"temperature": True}, "invalid_type", "temperature"),
    ({"temperature": [1]}, "invalid_type", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_p": 1.01}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": 301}, "invalid_value", "top_k"),
    ({"min_p": 1.5}, "invalid_value", "min_p"),
    ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -3}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"repetition_penalty": 1e-45}, "invalid_value", "repetition_penalty"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 17}, "invalid_value", "n"),
    ({"n": 1.5}, "invalid_type", "n"),
    ({"n": True}, "invalid_type", "n"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"max_tokens": 2**40}, "invalid_value", "max_tokens"),
    ({"max_tokens": 4000}, "context_length_exceeded", "messages"),
    ({"max_completion_tokens": 4000}, "context_length_exceeded", "messages"),
    ({"min_tokens": 5, "max_tokens": 4}, "invalid_value", "min_tokens"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": [""]}, "invalid_value", "stop[0]"),
    ({"stop": ["a"] * 17}, "invalid_value", "stop"),
    ({"stop": "a" * 257}, "invalid_value", "stop"),
    ({"stop": 5}, "invalid_type", "stop"),
    ({"stop": [5]}, "invalid_type", "stop[0]"),
    ({"seed": 2**63}, "invalid_value", "seed"),
    ({"seed": -(2**63) - 1}, "invalid_value", "seed"),
    ({"seed": 1.5}, "invalid_type", "seed"),
    ({"logprobs": 3}, "invalid_type", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "invalid_value", "top_logprobs"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias[...]"),
    ({"logit_bias": {"x": 1}}, "invalid_value", None),
    ({"logit_bias": {"-1": 1}}, "invalid_value", None),
    ({"logit_bias": {"300": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "invalid_value", "logit_bias"),
    ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
    ({"stop_token_ids": [300]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids[0]"),
    ({"stream": "yes"}, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_usge": True}},
     "unknown_parameter", "stream_options.include_usge"),
    ({"cache_salt": "a/b"}, "invalid_value", "cache_salt"),
    ({"cache_salt": "a" * 129}, "invalid_value", "cache_salt"),
    ({"user": "u" * 513}, "invalid_value", "user"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": [1]}}, "invalid_value", "chat_template_kwargs"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]},
     "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"response_format": {"type": "json_schema"}},
     "missing_required_parameter", "response_format.json_schema"),
    ({"response_format": "json"}, "invalid_type", "response_format"),
    ({"guided_grammar": "a"}, "unsupported_parameter", "guided_grammar"),
    ({"audio": {"voice": "x"}}, "unsupported_parameter", "audio"),
    ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
    ({"functions": [1]}, "unsupported_parameter", "functions"),
    ({"store": True}, "unsupported_parameter", "store"),
    ({"store": 0}, "unsupported_parameter", "store"),
    ({"temprature": 1}, "unknown_parameter", "temprature"),
    ({"": 1}, "unknown_parameter", ""),
    ({"x" * 10_000: 1}, "unknown_parameter", "x" * 200),
    ({"prompt": "x"}, "unknown_parameter", "prompt"),
]  # fmt: skip

PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({}, "missing_required_parameter"),
    ({"prompt": None}, "invalid_type"),
    ({"prompt": ""}, "invalid_value"),
    ({"prompt": []}, "invalid_value"),
    ({"prompt": [[]]}, "invalid_value"),
    ({"prompt": [""]}, "invalid_value"),
    ({"prompt": [-1]}, "invalid_value"),
    ({"prompt": [300]}, "invalid_value"),
    ({"prompt": [2**70]}, "invalid_value"),
    ({"prompt": [1.5]}, "invalid_type"),
    ({"prompt": [True]}, "invalid_type"),
    ({"prompt": ["a", 1]}, "invalid_type"),
    ({"prompt": ["a", [1]]}, "invalid_type"),
    ({"prompt": [1, [1]]}, "invalid_type"),
    ({"prompt": [[1], [1, "a"]]}, "invalid_type"),
    ({"prompt": ["a"] * 129}, "invalid_value"),
    ({"prompt": "a" * 2048}, "context_length_exceeded"),
    ({"prompt": "a" * 3000}, "context_length_exceeded"),
    ({"prompt": [1] * 2000, "max_tokens": 49}, "context_length_exceeded"),
    ({"prompt": "a", "suffix": "b"}, "unsupported_parameter"),
    ({"prompt": "a", "best_of": 2}, "unsupported_parameter"),
    ({"prompt": "a", "best_of": 2, "n": 3}, "unsupported_parameter"),
    ({"prompt": "a", "logprobs": 21}, "invalid_value"),
    ({"prompt": "a", "logprobs": True}, "invalid_type"),
    ({"prompt": "a", "echo": 1}, "invalid_type"),
    ({"prompt": "a", "messages": []}, "unknown_parameter"),
]


def refused(server: Running, path: str, body: bytes | dict[str, Any]) -> dict[str, Any]:
    answer = call(server.port, "POST", path, body)
    assert 400 <= answer.status < 500, (answer.status, answer.raw)
    assert answer.status != 422
    assert answer.headers["content-type"] == "application/json"
    assert is_error_body(answer.json), answer.raw
    error: dict[str, Any] = answer.json["error"]
    return error


@pytest.mark.parametrize(("body", "code"), [row[1:] for row in BODIES], ids=[r[0] for r in BODIES])
def test_bad_bodies(server: Running, body: bytes, code: str) -> None:
    assert refused(server, CHAT, body)["code"] == code
    assert refused(server, LEGACY, body)["code"] in (code, "unknown_parameter")


@pytest.mark.parametrize(("change", "code", "param"), FIELDS)
def test_bad_chat_fields(
    server: Running, change: dict[str, Any], code: str, param: str | None
) -> None:
    error = refused(server, CHAT, chat_body("hi") | change)
    assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error


@pytest.mark.parametrize(("body", "code"), PROMPTS)
def test_bad_prompts(server: Running, body: dict[str, Any], code: str) -> None:
    error = refused(server, LEGACY, {"model": "fake", "max_tokens": 4} | body)
    assert error["code"] == code, error


def test_every_sampling_bound_holds_on_both_routes(server: Running) -> None:
    shared = [row for row in FIELDS if next(iter(row[0])) not in ("messages", "logprobs", "model")]
    for change, _, _ in shared:
        names = set(change)
        if names & {"max_completion_tokens", "top_logprobs", "chat_template_kwargs", "prompt"}:
            continue
        if change in ({"max_tokens": 0}, {"max_tokens": 4000}):
            continue
        refused(server, LEGACY, {"model": "fake", "prompt": "a"} | change)


def test_neutral_values_are_welcome(server: Running) -> None:
    """What clients send unasked must not be an error."""
    neutral = {
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": None,
        "response_format": {"type": "text"}, "modalities": ["text"], "audio": None,
        "store": False, "metadata": {}, "service_tier": "auto", "user": "someone",
        "logit_bias": None, "stop": None, "n": None, "stream": None, "seed": None,
        "prompt_cache_key": "k", "safety_identifier": "s", "temperature": None,
    }  # fmt: skip
    body = chat_body("say:x") | neutral
    body["messages"].append(
        {"role": "assistant", "content": "earlier", "refusal": None, "tool_calls": None,
         "annotations": [], "audio": None, "function_call": None, "reasoning_content": "hm"}
    )  # fmt: skip
    # OpenAI's clients add these to an answer, and send them back with it.
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    body["messages"] += [
        {"role": "assistant", "content": None, "parsed": {"a": 1},
         "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]  # fmt: skip
    parts = [{"type": "text", "text": "say:"}, {"type": "text", "text": "y"}]
    body["messages"].append({"role": "user", "content": parts})
    answer = call(server.port, "POST", CHAT, body)
    assert answer.status == 200, answer.raw
    assert answer.json["choices"][0]["message"]["content"] == "y"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["messages", "temperature", "top_p", "n", "stop", "stream", "stream_options", "seed",
     "logit_bias", "logprobs", "top_logprobs", "max_tokens", "min_tokens", "tools", "user",
     "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
     "chat_template_kwargs", "cache_salt", "stop_token_ids", "prompt", "echo"]
)  # fmt: skip


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=st.sampled_from([CHAT, LEGACY]), changes=st.dictionaries(NAMES, VALUES, max_size=4))
def test_no_body_makes_a_server_error(server: Running, path: str, changes: dict[str, Any]) -> None:
    base = chat_body("hi", max_tokens=3) if path == CHAT else {"model": "fake", "prompt": "hi"}
    answer = call(server.port, "POST", path, json.dumps(base | changes).encode())
    assert answer.status < 500, answer.raw
    if answer.status != 200:
        assert answer.status >= 400 and answer.status != 422
        assert is_error_body(answer.json), answer.raw


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cut=st.integers(0, len(GOOD)), junk=st.binary(max_size=12), kept=st.booleans())
def test_no_bytes_make_a_server_error(server: Running, cut: int, junk: bytes, kept: bool) -> None:
    good = raw(GOOD)
    body = good[:cut] + junk + (good[cut:] if kept else b"")
    answer = call(server.port, "POST", CHAT, body)
    assert answer.status < 500
    assert answer.status == 200 or is_error_body(answer.json)


def test_http_faults_are_errors_in_form(server: Running) -> None:
    port = server.port
    big = {"content-type": "application/json"}
    cases = [
        (call(port, "GET", "/nope"), 404, "not_found"),
        (call(port, "GET", "/v1/chat/completions/"), 404, "not_found"),
        (call(port, "GET", CHAT), 405, "method_not_allowed"),
        (call(port, "DELETE", "/v1/models"), 405, "method_not_allowed"),
        (call(port, "POST", CHAT, b"{}", {"content-type": "text/plain"}), 415,
         "unsupported_media_type"),
        (call(port, "POST", CHAT, raw(GOOD), {"content-type": ""}), 415, "unsupported_media_type"),
        (call(port, "POST", CHAT, b" " * (4 * 2**20 + 1), big), 413, "body_too_large"),
        (call(port, "GET", "/v1/models", None, {f"x-{i}": "1" for i in range(300)}), 431,
         "too_many_headers"),
    ]  # fmt: skip
    for answer, status, code in cases:
        assert (answer.status, answer.json["error"]["code"]) == (status, code)
        assert is_error_body(answer.json)
    assert cases[2][0].headers["allow"] == "POST"


def test_large_body_without_length_is_refused(server: Running) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    chunks = (b" " * 2**16 for _ in range(80))
    try:
        connection.request(
            "POST", CHAT, chunks, {"Content-Type": "application/json"}, encode_chunked=True
        )
    except (BrokenPipeError, ConnectionResetError):
        return  # it hung up on us while we sent: refused as well
    assert connection.getresponse().status == 413


def test_request_id(server: Running) -> None:
    echoed = call(server.port, "GET", "/health", None, {"X-Request-Id": "abc-123"})
    assert echoed.headers["x-request-id"] == "abc-123"
    for bad in ("a" * 129, "sp ace", "ö"):
        made = call(server.port, "GET", "/nope", None, {"X-Request-Id": bad}).headers
        assert len(made["x-request-id"]) == 32
