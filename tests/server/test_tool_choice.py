"""Calls that must hold, through the server: a model that would rather talk is held to them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from fake_server import Running, call, events, fake_server
from fake_texts import TEXTS, VOCAB, write_script

from metainfer.core.errors import RequestError
from metainfer.core.request import GrammarSpec
from metainfer.server.bodies import convert
from metainfer.server.schemas import ChatRequest
from metainfer.server.tool_choice import ToolChoice, choice_of

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))

from transcripts import block, invoke, tool_call

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
    "required": ["city"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": WEATHER,
    "now": {"type": "object", "properties": {}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def of_tools(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def replies(family: str) -> dict[str, str]:
    """What the models behind the server want to say."""
    good, odd = ("weather", {"city": "Łódź"}), ("weather", {"city": 3, "more": []})
    made = (lambda *c: "\n".join(tool_call(*one) for one in c)) if family == "qwen" else (
        lambda *c: block(*(invoke(*one) for one in c))
    )  # fmt: skip
    think = "<think>" if family == "qwen" else ""
    return {
        "talk": f"{think}Hm.</think>I will not.",
        "good": f"{think}Hm.</think>Look: {made(good, ('now', {}))}",
        "odd": f"{think}Hm.</think>Look: {made(odd)}",
        "early": f"{think}Hm. {made(odd)}</think>Yes.",
        "json": f'{think}Hm.</think>{{"a": 1}}',
        "two": f"{think}Hm.</think>{made(good, good)}",
    }


@pytest.fixture(scope="module", params=["qwen", "deepseek"])
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Running]:
    if request.param == "deepseek":
        pytest.importorskip("deepseek_recipe", reason="tools need pip install deepseek-recipe")
    path = tmp_path_factory.mktemp("s") / "script.json"
    script = write_script(path, request.param, replies(request.param))
    engine = ["--script", str(script), "--held", request.param, "--tokens-per-step", "3"]
    with fake_server(["--text", request.param], engine) as running:
        yield running


def ask(running: Running, play: str, **fields: Any) -> dict[str, Any]:
    """The choice, asked for in both ways; what its calls hold is valid."""
    content = f"play:{play};"
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], "tools": TOOLS}
    body |= fields
    answer = call(running.port, "POST", CHAT, body)
    assert answer.status == 200, answer.raw
    (choice,) = answer.json["choices"]
    message = choice["message"]
    made = [one["function"] for one in message.get("tool_calls") or ()]
    got = {
        "finish": choice["finish_reason"],
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "calls": [(one["name"], json.loads(one["arguments"])) for one in made],
        "notes": choice.get("metainfer", {}).get("notes", []),
    }
    streamed = call(running.port, "POST", CHAT, body | {"stream": True})
    deltas = [one["choices"][0] for one in events(streamed.raw) if one != "[DONE]"]
    whole: dict[str, list[Any]] = {"content": [], "tool_calls": []}
    for delta in deltas:
        for name, parts in whole.items():
            if delta["delta"].get(name):
                parts.append(delta["delta"][name])
    assert "".join(whole["content"]) == got["content"]
    assert len(whole["tool_calls"]) == 2 * len(made)  # a head and its arguments
    assert deltas[-1]["finish_reason"] == got["finish"]
    return got


def valid(got: dict[str, Any]) -> dict[str, Any]:
    for name, arguments in got["calls"]:
        jsonschema.validate(arguments, SCHEMAS[name])
        assert arguments.keys() <= SCHEMAS[name]["properties"].keys()
    return got


def test_b34_a_call_that_is_required_comes(model: Running) -> None:
    for play in ("talk", "odd", "json"):
        for choice in ("required", of_tools("required", "weather", "now"), NAMED):
            got = valid(ask(model, play, tool_choice=choice))
            assert got["calls"] and got["finish"] == "tool_calls", (play, choice, got)
            assert not got["content"] and got["notes"] == []
            assert got["reasoning"] == "Hm."
    got = valid(ask(model, "two", tool_choice="required"))
    assert [name for name, _ in got["calls"]] == ["weather", "weather"]


def test_b34_no_call_begins_inside_reasoning(model: Running) -> None:
    """It would escape its grammar. Without one it is read there, as ever."""
    free = ask(model, "early")
    assert free["calls"] == [("weather", {"city": 3, "more": []})]
    held = valid(ask(model, "early", tool_choice="required", max_tokens=500))
    assert held["reasoning"].startswith("Hm. ") and "weather" not in held["reasoning"]
    assert held["calls"] or held["finish"] == "length"


def test_one_function_is_called_once(model: Running) -> None:
    for fields in (
        {"tool_choice": NAMED},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ):
        got = valid(ask(model, "two", **fields))
        assert got["calls"] == [("weather", {"city": "Łódź"})] and got["finish"] == "tool_calls"
    got = valid(ask(model, "two", tool_choice=of_tools("required", "now"), max_tokens=400))
    assert {name for name, _ in got["calls"]} == {"now"}


def test_under_auto_the_model_says_what_it_likes(model: Running) -> None:
    """Strict schemas hold once a call begins; the text before it is the model's own."""
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    assert ask(model, "talk", tools=strict)["content"] == "I will not."
    good = valid(ask(model, "good", tools=strict))
    assert good["content"] == "Look: " or good["content"] == "Look:"
    assert good["calls"] == [("weather", {"city": "Łódź"}), ("now", {})] and not good["notes"]
    free = ask(model, "odd")
    assert free["calls"] == [("weather", {"city": 3, "more": []})]
    held = valid(ask(model, "odd", tools=strict, max_tokens=700))
    assert held["content"].startswith("Look:") and held["notes"] in ([], ["call_not_finished"])
    assert held["calls"] or held["finish"] == "length"


def test_a_tool_that_is_not_allowed_is_not_called(model: Running) -> None:
    got = ask(model, "odd", tool_choice=of_tools("auto", "now"), max_tokens=600)
    assert {name for name, _ in got["calls"]} <= {"now"}
    assert got["content"].startswith("Look:")
    log = [line for line in model.lines() if line.startswith("prompt")][-1]
    ids = json.loads(log.split(" ", 1)[1])
    shown = [TEXTS[name](VOCAB).tokenizer.join(ids) for name in ("qwen", "deepseek")]
    assert any(b"weather" in text and b"play:odd" in text for text in shown)  # all the same


def test_a_form_or_a_call(model: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    said = ask(model, "json", response_format=form)
    assert json.loads(said["content"]) == {"a": 1} and said["finish"] == "stop"
    called = ask(model, "two", response_format=form)
    assert len(called["calls"]) == 2 and called["finish"] == "tool_calls"
    neither = ask(model, "talk", response_format=form, max_tokens=700)
    if neither["finish"] == "stop":
        jsonschema.validate(json.loads(neither["content"]), schema)
    else:
        assert neither["calls"] or neither["finish"] == "length"
    for fields, text in (
        ({"guided_choice": ["ja", "nein"]}, "ja nein"),
        ({"guided_regex": "j/a"}, "j/a"),
    ):
        got = ask(model, "talk", max_tokens=700, **fields)
        assert got["content"] in text.split() or got["finish"] != "stop"
    only = valid(ask(model, "json", response_format=form, tool_choice="required"))
    assert only["calls"] and not only["content"]


@pytest.mark.parametrize("limit", [5, 12, 30, 60, 90])
def test_b31_a_call_that_is_cut_is_no_call(model: Running, limit: int) -> None:
    got = valid(ask(model, "two", tool_choice="required", max_tokens=limit))
    assert got["finish"] == "length"
    assert got["calls"] or got["notes"] == ["call_not_finished"] or limit < 30
    assert not got["content"].strip("\n<")


def test_a_stop_string_ends_a_call_too(model: Running) -> None:
    got = ask(model, "two", tool_choice="required", stop=["dź"])
    assert not got["calls"] and got["finish"] == "stop" and got["notes"] == ["call_not_finished"]


SPELLINGS: list[tuple[dict[str, Any], ToolChoice]] = [
    ({}, ToolChoice()),
    ({"tool_choice": None}, ToolChoice()),
    ({"tool_choice": "auto", "parallel_tool_calls": False}, ToolChoice(one=True)),
    ({"tool_choice": "none"}, ToolChoice("none")),
    ({"tool_choice": "required"}, ToolChoice("required")),
    ({"tool_choice": NAMED}, ToolChoice("required", ("weather",), one=True)),
    ({"tool_choice": of_tools("auto", "now", "now")}, ToolChoice("auto", ("now",))),
    ({"tool_choice": of_tools("required", "now")}, ToolChoice("required", ("now",))),
]


@pytest.mark.parametrize(("fields", "choice"), SPELLINGS)
def test_spellings(fields: dict[str, Any], choice: ToolChoice) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    assert choice_of(convert(body | fields, ChatRequest)) == choice


def with_schema(schema: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "bad", "parameters": schema, **more}
    return {"tools": [*TOOLS, {"type": "function", "function": function}]}


HARD = {"properties": {"a": {"not": {}}}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "always"}, "invalid_value", "'always'"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "invalid_value", "'h'"),
    ({"tool_choice": {"type": "function"}}, "invalid_value", "function"),
    ({"tool_choice": {"type": "custom"}}, "invalid_value", "'custom'"),
    ({"tool_choice": of_tools("auto")}, "invalid_value", "no tool"),
    ({"tool_choice": of_tools("perhaps", "now")}, "invalid_value", "perhaps"),
    ({"tool_choice": "required", "tools": []}, "invalid_value", "no tool"),
    ({"tool_choice": "required", **with_schema(HARD)}, "invalid_schema", "'bad'"),
    ({"tool_choice": "required", **with_schema({"$ref": "#/$defs/x"})}, "invalid_schema", "'bad'"),
    ({"tool_choice": "required", **with_schema({"const": "x" * 5000})}, "invalid_schema", "'bad'"),
    ({"tool_choice": "required", "ignore_eos": True}, "invalid_value", "ignore_eos"),
    ({"response_format": {"type": "json_object"}, **with_schema(HARD, strict=True)},
     "invalid_schema", "'bad'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "word"), BAD)
def test_what_cannot_hold_is_refused(
    model: Running, fields: dict[str, Any], code: str, word: str
) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "play:talk;"}]}
    answer = call(model.port, "POST", CHAT, body | {"tools": TOOLS} | fields)
    assert answer.status == 400, answer.raw
    error = answer.json["error"]
    assert error["code"] == code and word in error["message"] and "\n" not in error["message"]


def test_too_many_tools_for_one_grammar(model: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [f"{i:04000d}" for i in range(14)]}}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(20)
    ]
    body = {"model": "fake", "messages": [{"role": "user", "content": "play:talk;"}]}
    answer = call(model.port, "POST", CHAT, body | {"tools": tools, "tool_choice": "required"})
    assert answer.status == 400 and "characters" in answer.json["error"]["message"]


def test_what_the_engine_is_sent(model: Running) -> None:
    """Markers are tokens in it; and none of a call's may be drawn before reasoning ends."""
    ask(model, "two", tool_choice="required")
    line = [line for line in model.lines() if line.startswith("submit")][-1]
    spec = json.loads(line.split(" ", 2)[2])["grammar"]
    assert spec["kind"] == "parts" and '"id":' in spec["text"]
    assert spec["barred"] and not set(spec["barred"]) & {*spec["after"], spec.get("opening")}


def test_the_openai_client(model: Running) -> None:
    with openai.OpenAI(base_url=f"{model.url}/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "play:talk;"}],
            tools=TOOLS,  # type: ignore[arg-type]
            tool_choice="required",
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls


def test_without_the_library_a_strict_tool_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from metainfer.server.enforced import call_grammar
    from metainfer.text.dialogue import Prompt
    from metainfer.text.markup import Opening

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = TEXTS["qwen"](VOCAB)
    tools = [{**TOOLS[0]["function"], "strict": True}]
    prompt = Prompt([1], Opening.CONTENT)

    def made(choice: ToolChoice) -> tuple[GrammarSpec | None, tuple[str, ...]]:
        return asyncio.run(call_grammar(text, tools, choice, None, prompt, "llguidance"))

    assert made(ToolChoice()) == (None, ("strict_not_enforced",))
    with pytest.raises(RequestError, match="llguidance"):
        made(ToolChoice("required"))
