"""What the bodies of Responses and Messages mean, and how they are refused: no server needed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import RequestError
from metainfer.server.bodies import convert, parse_json
from metainfer.server.dialects import messages_body, responses_body
from metainfer.server.schemas import ChatRequest

PATHS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "responses": (
        responses_body.ResponsesRequest, responses_body.RULES, responses_body.chat_of,
        {"model": "m", "input": "hi"},
    ),
    "messages": (
        messages_body.MessagesRequest, messages_body.RULES, messages_body.chat_of,
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    ),
}  # fmt: skip


def chat(path: str, **changes: Any) -> dict[str, Any]:
    """The chat request that the body means, without what is None."""
    kind, rules, chat_of, base = PATHS[path]
    body = convert(parse_json(json.dumps(base | changes).encode()), kind, rules)
    request, _ = chat_of(body)
    assert isinstance(request, ChatRequest)
    return tidy(msgspec.to_builtins(request))


def tidy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: tidy(item) for name, item in value.items() if item is not None}
    return [tidy(item) for item in value] if isinstance(value, list) else value


def refused(path: str, **changes: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(path, **changes)
    assert caught.value.status == 400
    return caught.value


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_a_text_is_a_users_message() -> None:
    assert chat("responses", instructions="Be brief.")["messages"] == [
        said("system", "Be brief."), said("user", "hi"),
    ]  # fmt: skip
    blocks = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]
    got = chat("messages", system=blocks)
    assert got["messages"] == [said("system", "Be"), said("user", "hi")]
    assert got["max_completion_tokens"] == 9


def test_an_answers_end_is_chosen_as_in_chat() -> None:
    got = chat("responses", stop=["."], ignore_eos=True, max_output_tokens=9)
    assert (got["stop"], got["ignore_eos"], got["max_completion_tokens"]) == (["."], True, 9)
    error = refused("responses", stop=5)
    assert error.param == "stop"


def test_items_of_one_answer_are_one_turn() -> None:
    items = [
        said("developer", "Be brief."),
        said("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "no"}],
         "content": [{"type": "reasoning_text", "text": "hm"}], "status": "completed"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I ", "annotations": [], "logprobs": [],
                      "parsed": None}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc_1",
         "parsed_arguments": {}},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a": 1.0}',
         "caller": {"type": "direct"}},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "wait."}]},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {"type": "function_call_output", "call_id": "1",
         "output": [{"type": "input_text", "text": "one"}]},
        said("assistant", "First."),
        said("assistant", "Second."),
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}]},
        said("user", "go on"),
    ]  # fmt: skip
    assert chat("responses", input=items)["messages"] == [
        said("developer", "Be brief."),
        said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        said("assistant", "I wait.", reasoning_content="hm",
             tool_calls=[called("1", "f", "{}"), called("2", "g", '{"a": 1.0}')]),
        said("tool", "two", tool_call_id="2"),
        said("tool", "one", tool_call_id="1"),
        said("assistant", "First."),
        said("assistant", "Second.", reasoning_content="so"),
        said("user", "go on"),
    ]  # fmt: skip


def test_blocks_become_turns() -> None:
    messages = [
        said("user", "a"),
        said("assistant", [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I ", "citations": None, "parsed_output": {}},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"é": [1, "x"]}},
            {"type": "tool_use", "id": "2", "name": "g", "input": {},
             "cache_control": {"type": "ephemeral"}},
        ]),
        said("user", [
            {"type": "tool_result", "tool_use_id": "1",
             "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}]},
            {"type": "tool_result", "tool_use_id": "2", "content": "no", "is_error": True},
            {"type": "text", "text": "and"}, {"type": "text", "text": "so"},
        ]),
        said("system", "Be brief."),
    ]  # fmt: skip
    got = chat("messages", messages=messages)
    assert got["messages"] == [
        said("user", "a"),
        said("assistant", "I ", reasoning_content="hm",
             tool_calls=[called("1", "f", '{"é": [1, "x"]}'), called("2", "g", "{}")]),
        said("tool", "one", tool_call_id="1"),
        said("tool", "Error: no", tool_call_id="2"),
        said("user", [{"type": "text", "text": "and"}, {"type": "text", "text": "so"}]),
        said("system", "Be brief."),
    ]  # fmt: skip
    assert "continue_final_message" not in got


@pytest.mark.parametrize(
    ("content", "is_error", "shown"),
    [("bad", True, "Error: bad"), ("error 5", True, "error 5"), (None, True, "Error:"),
     ("bad", False, "bad"), (None, None, "")],
)  # fmt: skip
def test_a_failed_tool_is_told_to_the_model(content: Any, is_error: Any, shown: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": is_error}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    got = chat("messages", messages=[said("assistant", [use]), said("user", [result])])
    assert got["messages"][1]["content"] == shown


def test_a_last_message_of_the_assistant_is_continued() -> None:
    messages = [said("user", "a"), said("assistant", "Once upon")]
    assert chat("messages", messages=messages)["continue_final_message"] is True


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def test_tools_reach_the_chat_request_as_they_were_sent() -> None:
    function = {"name": "f", "parameters": SCHEMA, "description": "d", "strict": True}
    expected = [{"type": "function", "function": function}]
    assert chat("responses", tools=[{"type": "function", **function}])["tools"] == expected
    tool = {"name": "f", "input_schema": SCHEMA, "description": "d", "strict": True,
            "cache_control": {"type": "ephemeral"}, "type": "custom"}  # fmt: skip
    got = chat("messages", tools=[tool])["tools"]
    assert got == expected
    assert list(got[0]["function"]) == ["name", "parameters", "description", "strict"]


NAMED = {"type": "function", "function": {"name": "f"}}
CHOICES = [
    ("responses", "auto", "auto", None),
    ("responses", "none", "none", None),
    ("responses", "required", "required", None),
    ("responses", {"type": "function", "name": "f"}, NAMED, None),
    ("responses", {"type": "allowed_tools", "mode": "required",
                   "tools": [{"type": "function", "name": "f"}]},
     {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, None),
    ("messages", {"type": "auto"}, "auto", None),
    ("messages", {"type": "none"}, "none", None),
    ("messages", {"type": "any"}, "required", None),
    ("messages", {"type": "tool", "name": "f"}, NAMED, None),
    ("messages", {"type": "any", "disable_parallel_tool_use": True}, "required", False),
    ("messages", {"type": "auto", "disable_parallel_tool_use": False}, "auto", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "choice", "expected", "parallel"), CHOICES)
def test_choices(path: str, choice: Any, expected: Any, parallel: Any) -> None:
    got = chat(path, tool_choice=choice)
    assert got["tool_choice"] == expected
    assert got.get("parallel_tool_calls") is parallel


def test_forms_efforts_and_numbers() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    got = chat("responses", text={"format": form, "verbosity": "medium"}, temperature=0.5,
               reasoning={"effort": "low", "summary": "auto"}, top_p=0.9, max_output_tokens=7,
               parallel_tool_calls=False, store=True, metadata={"a": "b"})  # fmt: skip
    assert got["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (got["reasoning_effort"], got["temperature"], got["top_p"]) == ("low", 0.5, 0.9)
    assert got["parallel_tool_calls"] is False and got["max_completion_tokens"] == 7
    got = chat("responses", text={"format": {"type": "json_object"}})
    assert got["response_format"] == {"type": "json_object"}
    config = {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}
    got = chat("messages", output_config=config, top_k=5, stop_sequences=["END"],
               metadata={"user_id": "u"})  # fmt: skip
    assert got["response_format"]["json_schema"] == {"schema": SCHEMA}
    assert (got["reasoning_effort"], got["top_k"], got["stop"]) == ("high", 5, ["END"])
    assert got["user"] == "u"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {"thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": True}),
        ({"output_config": {"effort": "low"}}, {}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_thinking_is_asked_for(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat("messages", **changes)["chat_template_kwargs"] == expected


USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
UNSUPPORTED, MISSING = "unsupported_parameter", "missing_required_parameter"
VALUE, TYPE, UNKNOWN = "invalid_value", "invalid_type", "unknown_parameter"
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("responses", {"previous_response_id": "resp_1"}, UNSUPPORTED, "previous_response_id"),
    ("responses", {"conversation": "c"}, UNSUPPORTED, "conversation"),
    ("responses", {"background": True}, UNSUPPORTED, "background"),
    ("responses", {"prompt": {"id": "p"}}, UNSUPPORTED, "prompt"),
    ("responses", {"truncation": "auto"}, UNSUPPORTED, "truncation"),
    ("responses", {"top_logprobs": 3}, UNSUPPORTED, "top_logprobs"),
    ("responses", {"include": ["message.output_text.logprobs"]}, UNSUPPORTED, "include[0]"),
    ("responses", {"text": {"verbosity": "low"}}, UNSUPPORTED, "text.verbosity"),
    ("responses", {"tools": [{"type": "web_search"}]}, UNSUPPORTED, "tools[0].type"),
    ("responses", {"tools": [{"name": "f"}]}, MISSING, "tools[0].type"),
    ("responses", {"tool_choice": {"type": "mcp"}}, UNSUPPORTED, "tool_choice.type"),
    ("responses", {"tool_choice": {"type": "function"}}, VALUE, "tool_choice"),
    ("responses", {"input": []}, VALUE, "input"),
    ("responses", {"input": 5}, TYPE, "input"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, UNSUPPORTED, "input[0].type"),
    ("responses", {"input": [{"type": "nonsense"}]}, VALUE, "input[0].type"),
    ("responses", {"input": [said("user", "x", type=None)]}, TYPE, "input[0].type"),
    ("responses", {"input": [{"content": "x"}]}, MISSING, "input[0].type"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     UNSUPPORTED, "input[0].content[0].type"),
    ("responses", {"input": [CALL | {"namespace": "n"}]}, UNSUPPORTED, "input[0].namespace"),
    ("responses", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
     UNSUPPORTED, "input[0]"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x"}}},
     MISSING, "text.format.schema"),
    ("responses", {"metadata": {"k": "v" * 513}}, VALUE, "metadata[...]"),
    ("responses", {"messages": []}, UNKNOWN, "messages"),
    ("responses", {"max_tokens": 5}, UNKNOWN, "max_tokens"),
    ("responses", {"input": [CALL, {"type": "function_call_output", "call_id": "1",
                                    "output": [{"text": "x"}]}]},
     MISSING, "input[1].output[0].type"),
    ("responses", {"input": [{"type": "reasoning", "summary": [{"text": "x"}]}]},
     MISSING, "input[0].summary[0].type"),
    ("responses", {"input": [{"type": "reasoning", "content": [{"text": "x"}]}]},
     MISSING, "input[0].content[0].type"),
    ("messages", {"system": [{"text": "x"}]}, MISSING, "system[0].type"),
    ("messages", {"max_tokens": 0}, VALUE, "max_tokens"),
    ("messages", {"system": 5}, TYPE, "system"),
    ("messages", {"messages": []}, VALUE, "messages"),
    ("messages", {"messages": [said("user", [{"type": "image", "source": {}}])]},
     UNSUPPORTED, "messages[0].content[0].type"),
    ("messages", {"messages": [said("user", [{"type": "tool_result", "tool_use_id": "1",
                                              "content": [{"type": "image"}]}])]},
     UNSUPPORTED, "messages[0].content[0].content[0].type"),
    ("messages", {"messages": [said("assistant", [{"type": "redacted_thinking", "data": "x"}])]},
     UNSUPPORTED, "messages[0].content[0].type"),
    ("messages", {"messages": [said("user", [USE])]}, VALUE, "messages[0].content[0].type"),
    ("messages", {"messages": [said("assistant", [{"type": "tool_result", "tool_use_id": "1"}])]},
     VALUE, "messages[0].content[0].type"),
    ("messages", {"messages": [said("assistant", [USE])]}, VALUE, "messages[0]"),
    ("messages", {"messages": [said("tool", "x")]}, VALUE, "messages[0].role"),
    ("messages",
     {"tools": [{"type": "bash_20250124", "name": "bash"}]}, UNSUPPORTED, "tools[0].type"),
    ("messages", {"tools": [{"name": "f"}]}, MISSING, "tools[0].input_schema"),
    ("messages", {"tool_choice": {"type": "tool"}}, MISSING, "tool_choice.name"),
    ("messages", {"thinking": {"type": "between_tools"}}, VALUE, "thinking.type"),
    ("messages", {"container": "c"}, UNSUPPORTED, "container"),
    ("messages", {"service_tier": "priority"}, UNSUPPORTED, "service_tier"),
    ("messages", {"stop": ["x"]}, UNKNOWN, "stop"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "changes", "code", "param"), BAD)
def test_refusals_name_what_the_client_wrote(
    path: str, changes: dict[str, Any], code: str, param: str
) -> None:
    error = refused(path, **changes)
    assert (error.code, error.param) == (code, param), str(error)


def test_what_the_core_refuses_is_told_in_the_dialects_words() -> None:
    core = RequestError(
        "messages[2].tool_call_id 'messages[0].tool_calls' is no call of the answer before it.",
        "Send each result once, after the assistant message whose tool_calls hold its id.",
        param="messages[2].tool_call_id",
        code="c",
    )
    items = [
        CALL,
        said("user", "x"),
        {"type": "function_call_output", "call_id": "1", "output": ""},
    ]
    kind, rules, chat_of, base = PATHS["responses"]
    _, names = chat_of(convert(base | {"instructions": "s", "input": items}, kind, rules))
    got = names.translated(core)
    assert got.param == "input[1].call_id"
    assert got.cause.startswith("input[1].call_id 'messages[0].tool_calls' is no call")
    assert "function_call hold" in got.remedy
    told = names.translated(
        RequestError("This model's chat template knows no reasoning_effort 'high'.")
    )
    assert told.cause == "This model's chat template knows no reasoning.effort 'high'."
    for field, said_as in (
        ("tools[3].function.parameters", "tools[3].parameters"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("messages", "input"),
    ):
        assert names.translated(RequestError("x", param=field)).param == said_as
    kind, rules, chat_of, base = PATHS["messages"]
    _, names = chat_of(convert(base, kind, rules))
    for field, said_as in (
        ("tools[3].function.parameters", "tools[3].input_schema"),
        ("tools[3].function.name", "tools[3].name"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("messages", "messages"),
    ):
        assert names.translated(RequestError("x", param=field)).param == said_as


@pytest.mark.parametrize("path", sorted(PATHS))
def test_deep_nesting_is_refused(path: str) -> None:
    block: Any = "x"
    for _ in range(400):
        block = [{"type": "tool_result", "tool_use_id": "1", "content": block}]
    field = "input" if path == "responses" else "messages"
    refused(path, **{field: [said("user", block)]})


def test_hints_and_neutral_values_are_welcome() -> None:
    neutral = {
        "background": False, "conversation": None, "previous_response_id": None, "include": [],
        "truncation": "disabled", "service_tier": "auto", "top_logprobs": 0, "user": "u",
        "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3, "store": True,
        "stream_options": {"include_obfuscation": False}, "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": "auto", "context": "auto"}, "tools": [],
    }  # fmt: skip
    assert chat("responses", **neutral)["messages"] == [said("user", "hi")]
    neutral = {
        "cache_control": {"type": "ephemeral"}, "service_tier": "auto", "container": None,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "speed": "standard", "mcp_servers": [], "metadata": {}, "stop_sequences": [],
    }  # fmt: skip
    assert chat("messages", **neutral)["messages"] == [said("user", "hi")]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
WORDS = st.sampled_from(
    ["type", "role", "content", "text", "name", "id", "call_id", "tool_use_id", "input", "output",
     "arguments", "summary", "tools", "mode", "format", "effort", "thinking", "caller", "function"]
)  # fmt: skip
KINDS = st.sampled_from(
    ["message", "text", "input_text", "output_text", "function_call", "function_call_output",
     "reasoning", "thinking", "tool_use", "tool_result", "function", "tool", "any", "custom",
     "allowed_tools", "json_schema", "image", "user", "assistant", "system"]
)  # fmt: skip
SHAPED = st.recursive(
    JUNK | KINDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner | KINDS, max_size=5),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(PATHS)), st.data())
def test_no_body_is_more_than_refused(path: str, data: Any) -> None:
    kind, rules, chat_of, base = PATHS[path]
    fields = st.sampled_from([field.encode_name for field in msgspec.structs.fields(kind)])
    body = base | data.draw(st.dictionaries(fields, SHAPED, max_size=3))
    try:
        chat_of(convert(body, kind, rules))
    except RequestError as error:
        assert error.status == 400 and error.cause
