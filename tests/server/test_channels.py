"""Reasoning and tool calls through the server: recorded answers played by the fake engine.

Every answer is asked for whole and streamed, with one and with several tokens a step; the types
of the OpenAI client check each body.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_server import Running, call, events, fake_server
from fake_texts import TEXTS, VOCAB, write_script
from openai.types.chat import ChatCompletion, ChatCompletionChunk

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))

from transcripts import CODE, DSML, NESTED, E, R, Transcript, block, invoke, tool_call

CHAT = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
]
PLAYED = [case for case in DSML if case.opening is not E]
REPLIES = {case.name: case.text for case in PLAYED} | {
    "two": "</think>" + block(invoke("f", {"a": 1}), invoke("g", {})),
    "stop": "because</think>one END two",
    "long": "x" * 5 + "</think>" + "y" * 50,
    "idle": "</think>" + block(invoke("f", {"path": "a" * 400})),
}
QWEN = {
    "call": "<think>\nhm\n</think>\n\nYes.\n" + tool_call("f", {"a": "é"}),
    "plain": "Just text",
    "off": tool_call("f", {}) + "\n" + tool_call("g", {"b": [1]}),
    "spelled": "The tag <tool_call> opens a call.",
}


@pytest.fixture(scope="module", params=[1, 3], ids=["one token a step", "three"])
def deepseek(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Running]:
    pytest.importorskip("deepseek_recipe", reason="tools need pip install deepseek-recipe")
    script = write_script(tmp_path_factory.mktemp("s") / "script.json", "deepseek", REPLIES)
    steps = ["--script", str(script), "--tokens-per-step", str(request.param)]
    with fake_server(["--text", "deepseek"], steps) as running:
        yield running


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: Any) -> Iterator[Running]:
    script = write_script(tmp_path_factory.mktemp("s") / "script.json", "qwen", QWEN)
    with fake_server(["--text", "qwen"], ["--script", str(script)]) as running:
        yield running


def body(name: str, **extra: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": f"play:{name};"}],
        "tools": TOOLS,
        **extra,
    }


def ask(running: Running, given: dict[str, Any]) -> dict[str, Any]:
    """The answer, asked for in both ways, which must agree."""
    answer = call(running.port, "POST", CHAT, given)
    assert answer.status == 200, answer.raw
    ChatCompletion.model_validate(answer.json)
    (choice,) = answer.json["choices"]
    raw = call(running.port, "POST", CHAT, given | {"stream": True}).raw
    assert raw.endswith(b"data: [DONE]\n\n")
    streamed = assemble(events(raw)[:-1])
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"]
    whole = {
        "reasoning": message["reasoning"] or "",
        "content": message["content"] or "",
        "calls": [
            (made["function"]["name"], made["function"]["arguments"])
            for made in message.get("tool_calls", [])
        ],
        "finish": choice["finish_reason"],
        "notes": choice.get("metainfer", {}).get("notes", []),
    }
    assert streamed == whole
    if whole["calls"] and not whole["content"]:
        assert message["content"] is None
    return whole | {"usage": answer.json["usage"], "message": message}


def assemble(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client puts together from chunks, insisting on how calls come."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "finish": None, "notes": []}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            found["reasoning"] += delta.get("reasoning") or ""
            found["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls", []):
                if part["index"] == len(calls):
                    assert part["id"].startswith("call_") and part["type"] == "function"
                    assert part["function"]["name"] and part["function"]["arguments"] == ""
                    calls.append({"id": part["id"], **part["function"]})
                else:
                    assert set(part) == {"index", "function"} and "name" not in part["function"]
                    assert part["index"] == len(calls) - 1
                    calls[-1]["arguments"] += part["function"]["arguments"]
            assert found["finish"] is None
            found["finish"] = choice["finish_reason"]
            found["notes"] = choice.get("metainfer", {}).get("notes", [])
    assert len({made["id"] for made in calls}) == len(calls)
    return found | {"calls": [(made["name"], made["arguments"]) for made in calls]}


@pytest.mark.parametrize("case", PLAYED, ids=[case.name for case in PLAYED])
def test_recorded_answers(deepseek: Running, case: Transcript) -> None:
    got = ask(deepseek, body(case.name, chat_template_kwargs={"thinking": case.opening is R}))
    assert (got["reasoning"], got["content"]) == (case.reasoning, case.content)
    assert [(name, json.loads(text)) for name, text in got["calls"]] == case.calls
    assert got["finish"] == ("tool_calls" if case.calls else "stop")
    assert got["notes"] == list(case.notes)


def test_reasoning_tokens_are_counted(deepseek: Running) -> None:
    got = ask(deepseek, body("stop", tools=None))
    words = len("because") + 1  # and the closing tag
    assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": words}
    assert got["usage"]["completion_tokens"] == words + len("one END two")
    off = ask(deepseek, body("content only", reasoning_effort="none", tools=None))
    assert off["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    endless = ask(deepseek, body("never closed", tools=None))
    words = len(REPLIES["never closed"])
    assert endless["usage"]["completion_tokens_details"] == {"reasoning_tokens": words}


def test_limits_cut_without_a_call_or_markup(deepseek: Running) -> None:
    text = REPLIES["two"]
    tokens = len(TEXTS["deepseek"](VOCAB).tokenizer.encode(text, add_special=False))
    seen = set()
    for limit in range(1, tokens + 1, 5):
        got = ask(deepseek, body("two", max_tokens=limit))
        assert got["finish"] == ("length" if limit < tokens else "tool_calls")
        assert got["content"] == got["reasoning"] == ""
        seen.add(len(got["calls"]))
        assert got["calls"] == [("f", '{"a": 1}'), ("g", "{}")][: len(got["calls"])]
    assert seen >= {0, 1}
    got = ask(deepseek, body("long", max_tokens=3))
    assert (got["reasoning"], got["finish"], got["notes"]) == ("xxx", "length", [])


def test_stop_strings_end_the_text_and_may_be_markers(deepseek: Running) -> None:
    got = ask(deepseek, body("stop", stop=["END"]))
    assert (got["reasoning"], got["content"], got["finish"]) == ("because", "one ", "stop")
    got = ask(deepseek, body("stop", stop=["</think>"]))
    assert (got["reasoning"], got["content"], got["finish"]) == ("because", "", "stop")


def test_one_call_at_a_time(deepseek: Running) -> None:
    got = ask(deepseek, body("two", parallel_tool_calls=False))
    assert got["calls"] == [("f", '{"a": 1}')] and got["finish"] == "tool_calls"
    both = ask(deepseek, body("two", parallel_tool_calls=True))
    assert len(both["calls"]) == 2
    used = [answer["usage"]["completion_tokens"] for answer in (got, both)]
    assert used[0] < used[1] - 20  # the rest is not generated for nothing


def test_strict_schemas_that_cannot_be_enforced_are_said_not_to_be(deepseek: Running) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    function = TOOLS[0]["function"] | {"strict": True, "parameters": parameters}
    strict = [{"type": "function", "function": function}]
    assert ask(deepseek, body("two", tools=strict))["notes"] == ["strict_not_enforced"]
    assert '"strict": true}' in prompt_of(deepseek, "deepseek")
    function["strict"] = False
    assert ask(deepseek, body("two", tools=strict))["notes"] == []


def test_the_clients_own_accumulation(deepseek: Running) -> None:
    client = openai.OpenAI(base_url=f"{deepseek.url}/v1", api_key="x", max_retries=0)
    given = body("reasoning, text, two calls")
    with client.chat.completions.stream(**given) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Both."
    assert choice.message.reasoning_content == "Plan.\n\n1. all"
    made = choice.message.tool_calls
    assert [json.loads(one.function.arguments) for one in made] == [NESTED, CODE]
    again = {
        "role": "assistant",
        **final.choices[0].message.model_dump(
            include={"content", "reasoning_content", "tool_calls"}, exclude_none=True
        ),
    }
    for one in again["tool_calls"]:  # the helper adds what it parsed
        one["function"].pop("parsed_arguments", None)
    results = [{"role": "tool", "tool_call_id": one.id, "content": "ok"} for one in made]
    turns = [*given["messages"], again, *results, {"role": "user", "content": "play:call alone;"}]
    answer = client.chat.completions.create(**(given | {"messages": turns}))
    assert answer.choices[0].message.tool_calls[0].function.name == "now"
    assert block(invoke("find", NESTED), invoke("write", CODE)) in prompt_of(deepseek, "deepseek")


def test_calls_nobody_offered_are_dropped(deepseek: Running) -> None:
    got = ask(deepseek, body("two", tool_choice="none"))
    assert (got["calls"], got["content"], got["finish"]) == ([], "", "stop")
    assert got["notes"] == ["call_not_offered"]


def test_logprobs_cover_every_token(deepseek: Running) -> None:
    given = body("stop", logprobs=True, tools=None)
    answer = call(deepseek.port, "POST", CHAT, given).json
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == REPLIES["stop"]
    raw = call(deepseek.port, "POST", CHAT, given | {"stream": True}).raw
    found = []
    for chunk in events(raw)[:-1]:
        found += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert found == content


def test_several_choices_keep_their_channels(deepseek: Running) -> None:
    answer = call(deepseek.port, "POST", CHAT, body("two", n=3)).json
    for choice in answer["choices"]:
        assert [made["function"]["name"] for made in choice["message"]["tool_calls"]] == ["f", "g"]
    ids = [made["id"] for c in answer["choices"] for made in c["message"]["tool_calls"]]
    assert len(set(ids)) == 6
    raw = call(deepseek.port, "POST", CHAT, body("two", n=3, stream=True)).raw
    for place in range(3):
        chunks = [
            chunk | {"choices": [c for c in chunk["choices"] if c["index"] == place]}
            for chunk in events(raw)[:-1]
        ]
        assert len(assemble(chunks)["calls"]) == 2


def test_template_families(qwen: Running) -> None:
    got = ask(qwen, body("call"))
    assert (got["reasoning"], got["content"]) == ("hm", "Yes.")
    assert got["calls"] == [("f", '{"a": "é"}')] and got["finish"] == "tool_calls"
    off = body("off", chat_template_kwargs={"enable_thinking": False})
    assert [name for name, _ in ask(qwen, off)["calls"]] == ["f", "g"]
    assert ask(qwen, body("off", reasoning_effort="none"))["calls"] == ask(qwen, off)["calls"]
    assert ask(qwen, body("plain"))["content"] == "Just text"
    assert ask(qwen, body("spelled", tools=None))["content"] == QWEN["spelled"]
    refused = call(qwen.port, "POST", CHAT, body("plain", reasoning_effort="high"))
    assert refused.status == 400 and refused.json["error"]["param"] == "reasoning_effort"


def prompt_of(running: Running, text: str) -> str:
    """The last prompt that the engine was given."""
    line = [line for line in running.lines() if line.startswith("prompt ")][-1]
    tokenizer = TEXTS[text](VOCAB).tokenizer
    return tokenizer.decode(json.loads(line.removeprefix("prompt ")), skip_special=False)


def history(**last: Any) -> dict[str, Any]:
    def made(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    calls = [made("1", "f", '{"a": "x"}'), made("2", "g", "{}")]
    return {
        "model": "fake",
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "2", "content": "two"},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "one"}]},
            {"role": "user", "content": "play:content only;"},
        ],
        **last,
    }


def test_calls_and_results_go_into_the_prompt(deepseek: Running, qwen: Running) -> None:
    got = ask(deepseek, history(chat_template_kwargs={"thinking": False}))
    assert got["content"] == REPLIES["content only"]
    text = prompt_of(deepseek, "deepseek")
    assert block(invoke("f", {"a": "x"}), invoke("g", {})) in text
    assert "<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>\n\nplay:" in text
    assert text.endswith("<｜Assistant｜></think>") and "hm" not in text
    asked = history()
    asked["messages"][-1]["content"] = "play:plain;"
    ask(qwen, asked)
    text = prompt_of(qwen, "qwen")
    assert '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>' in text
    assert "<|im_start|>tool\ntwo<|im_end|>" in text and "<think>hm</think>" in text


def test_answers_are_continued(deepseek: Running, qwen: Running) -> None:
    last = {"role": "assistant", "content": "So play:content only;"}
    for how in ({"continue_final_message": True}, {}):
        turn = last if how else last | {"prefix": True}
        given = {"model": "fake", "messages": [{"role": "user", "content": "q"}, turn], **how}
        ask(deepseek, given)
        assert prompt_of(deepseek, "deepseek").endswith(
            "<｜Assistant｜><think></think>So play:content only;"
        )
    last["content"] = "So play:plain;"
    ask(qwen, {"model": "fake", "messages": [{"role": "user", "content": "q"}, last],
               "continue_final_message": True})  # fmt: skip
    assert prompt_of(qwen, "qwen").endswith("<|im_start|>assistant\nSo play:plain;")


def test_efforts_and_their_names(deepseek: Running) -> None:
    for how in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}},
                {"chat_template_kwargs": {"reasoning_effort": "none"}}):  # fmt: skip
        ask(deepseek, body("content only", tools=None, **how))
        assert prompt_of(deepseek, "deepseek").endswith("</think>")
    ask(deepseek, body("reasoned", tools=None, reasoning_effort="low"))
    assert prompt_of(deepseek, "deepseek").endswith("<think>")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}},
     "invalid_value", "tool_choice"),
    ({"tool_choice": "always"}, "invalid_value", "tool_choice"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "invalid_value", "tools"),
    ({"tools": [{"type": "function", "function": {}}]},
     "missing_required_parameter", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
     "invalid_value", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
     "invalid_value", "tools[0].function.description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
     "invalid_value", "tools[0].function.parameters"),
    ({"tools": [{"type": "web"}]}, "invalid_value", "tools[0].type"),
    ({"tools": TOOLS * 65}, "invalid_value", "tools"),
    ({"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
    ({"chat_template_kwargs": {"reasoning_effort": "huge"}}, "invalid_value",
     "chat_template_kwargs"),
    ({"chat_template_kwargs": {"thinking": "yes"}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
     "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"other": 1}}, "invalid_value", "chat_template_kwargs"),
    ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "param"), BAD)
def test_bad_tools_and_switches(deepseek: Running, change: dict, code: str, param: str) -> None:
    answer = call(deepseek.port, "POST", CHAT, body("two") | change)
    assert answer.status == 400, answer.raw
    error = answer.json["error"]
    assert (error["code"], error["param"]) == (code, param), error


def change_history(change: Any) -> dict[str, Any]:
    given = history()
    change(given["messages"])
    return given


BAD_HISTORY = [
    (lambda m: m[2].update(tool_call_id="9"), "invalid_value", "messages[2].tool_call_id"),
    (lambda m: m[3].update(tool_call_id="2"), "invalid_value", "messages[3].tool_call_id"),
    (lambda m: m[2].pop("tool_call_id"), "missing_required_parameter", "messages[2].tool_call_id"),
    (lambda m: m[1].pop("tool_calls"), "invalid_type", "messages[1].content"),
    (lambda m: m[1]["tool_calls"][1].update(id="1"), "invalid_value", "messages[1].tool_calls"),
    (lambda m: m[1]["tool_calls"][1].pop("id"),
     "missing_required_parameter", "messages[1].tool_calls[1].id"),
    (lambda m: m.insert(2, {"role": "user", "content": "x"}),
     "invalid_value", "messages[3].tool_call_id"),
    (lambda m: m[0].update(prefix=True), "invalid_value", "messages[0].prefix"),
    (lambda m: m[4].update(prefix=True), "invalid_value", "messages[4].prefix"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "param"), BAD_HISTORY)
def test_bad_history(deepseek: Running, change: Any, code: str, param: str) -> None:
    answer = call(deepseek.port, "POST", CHAT, change_history(change))
    assert answer.status == 400, answer.raw
    error = answer.json["error"]
    assert (error["code"], error["param"]) == (code, param), error


def test_a_model_whose_calls_cannot_be_read_refuses_tools(server: Running) -> None:
    given = body("x")
    answer = call(server.port, "POST", CHAT, given)
    assert answer.status == 400 and answer.json["error"]["code"] == "unsupported_parameter"
    assert call(server.port, "POST", CHAT, given | {"tool_choice": "none"}).status == 200


def test_without_the_publishers_texts_plain_chat_works(tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.json", "bare", {"hi": "hm</think>Hello."})
    with fake_server(["--text", "bare"], ["--script", str(script)]) as running:
        got = ask(running, body("hi", tools=None))
        assert (got["reasoning"], got["content"]) == ("hm", "Hello.")
        for how in ({}, {"tools": None, "reasoning_effort": "max"}):
            refused = call(running.port, "POST", CHAT, body("hi", **how))
            assert refused.status == 400
            error = refused.json["error"]
            assert error["code"] == "prompt_text_missing" and "no encoder" in error["message"]
            assert "deepseek-recipe" in error["message"]
        shown = call(running.port, "GET", "/v1/models").json["data"][0]["prompt_format"]
        assert (shown["tools"], shown["pieces"]) == (False, None)


def test_the_model_list_says_how_answers_are_read(deepseek: Running, qwen: Running) -> None:
    def shown(running: Running) -> dict[str, Any]:
        return call(running.port, "GET", "/v1/models").json["data"][0]["prompt_format"]

    assert shown(deepseek)["prompt"] == "deepseek-v4"
    assert shown(deepseek)["efforts"][:2] == ["none", "low"]
    assert shown(qwen) == {"prompt": "template", "answer": "qwen3", "tools": True}


def test_tokenize_is_what_chat_does(deepseek: Running) -> None:
    given = body("content only", chat_template_kwargs={"thinking": False})
    ask(deepseek, given)
    prompt = prompt_of(deepseek, "deepseek")
    answer = call(deepseek.port, "POST", "/tokenize", given | {"return_token_strs": True})
    assert answer.status == 200, answer.raw
    assert "".join(answer.json["token_strs"]).encode() == prompt.encode()
    back = call(deepseek.port, "POST", "/detokenize", {"tokens": answer.json["tokens"]})
    assert back.json == {"prompt": prompt}
    worst = call(deepseek.port, "POST", "/detokenize", {"tokens": [VOCAB]})
    assert worst.status == 400 and worst.json["error"]["param"] == "tokens"
