"""Anthropic's own client and types against ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from fake_server import Running, fake_server
from fake_texts import write_script
from pydantic import BaseModel, TypeAdapter

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
SAID = {
    "call": f"<think>\nI must look.\n</think>\n\nOne moment.\n{CALL}",
    "json": '{"city": "Łódź", "degrees": 3}',
    "text": "It rains.",
}
WEATHER: Any = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def client_of(running: Running, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        **({"base_url": running.url, "api_key": "any", "max_retries": 0} | options)
    )


@pytest.fixture
def client(server: Running) -> anthropic.Anthropic:
    return client_of(server)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: Any) -> Iterator[anthropic.Anthropic]:
    script = write_script(tmp_path_factory.mktemp("s") / "script.json", "qwen", SAID)
    steps = ["--script", str(script), "--tokens-per-step", "2"]
    with fake_server(["--text", "qwen"], steps) as running:
        yield client_of(running)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 300, "messages": [user(text)], **more}


def strict(message: Any) -> Message:
    """`message` by the types themselves, which do not forgive what the client forgives."""
    return Message.model_validate(message.model_dump(mode="json", warnings="error"))


def test_text(client: anthropic.Anthropic) -> None:
    message = strict(client.messages.create(**ask("say:héllo ☃", system="Be brief.")))
    assert [block.text for block in message.content] == ["héllo ☃"]
    assert (message.role, message.stop_reason) == ("assistant", "end_turn")
    usage = message.usage
    prompt = len(b"system: Be brief.\nuser: ") + len("say:héllo ☃\nassistant: ".encode())
    assert usage.cache_read_input_tokens == prompt // 16 * 16
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt
    assert usage.output_tokens == len("héllo ☃".encode())


def test_stream(client: anthropic.Anthropic) -> None:
    kinds = []
    for event in client.messages.create(**ask("say:naïve ☃"), stream=True):
        EVENTS.validate_python(event.model_dump(mode="json"))
        kinds.append(event.type)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_delta") > 5
    with client.messages.stream(**ask("say:naïve ☃")) as stream:
        assert "".join(stream.text_stream) == "naïve ☃"
        final = strict(stream.get_final_message())
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len("naïve ☃".encode())


def test_thinking_text_and_a_round_of_tools(scripted: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    given = ask("play:call;", tools=[WEATHER], thinking=thinking)
    with scripted.messages.stream(**given) as stream:
        for event in stream:
            assert event.type != "error"
        streamed = strict(stream.get_final_message())
    message = strict(scripted.messages.create(**given))
    same = {"content": {"__all__": {"id"}}, "id": True}
    dumped = [
        m.model_dump(exclude=same | {"metainfer": True}, exclude_none=True)
        for m in (message, streamed)
    ]
    assert dumped[0] == dumped[1]
    thought, text, use = message.content
    assert (thought.type, thought.thinking) == ("thinking", "I must look.")
    assert (text.type, text.text) == ("text", "One moment.")
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Łódź"})
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "play:text;"}
    messages: list[Any] = [
        *given["messages"], {"role": "assistant", "content": message.content}, user([result])
    ]  # fmt: skip
    again = scripted.messages.create(**(given | {"messages": messages}))
    assert [block.text for block in strict(again).content] == ["It rains."]


class Weather(BaseModel):
    city: str
    degrees: int


def test_parse_and_send_back(scripted: anthropic.Anthropic) -> None:
    given = ask("play:json;")
    message = scripted.messages.parse(**given, output_format=Weather)
    assert message.parsed_output == Weather(city="Łódź", degrees=3)
    with scripted.messages.stream(**given, output_format=Weather) as stream:
        assert stream.get_final_message().parsed_output == message.parsed_output
    messages: list[Any] = [
        *given["messages"],
        {"role": "assistant", "content": message.content},
        user("play:text;"),
    ]
    again = scripted.messages.create(**(given | {"messages": messages}))
    assert [block.text for block in again.content] == ["It rains."]


def test_stop_sequence_and_limit(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ask("say:one END two", stop_sequences=["END"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    message = strict(client.messages.create(**(ask("go on") | {"max_tokens": 4})))
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 4)
    message = strict(client.messages.create(**(ask("go on") | {"max_tokens": 9000})))
    assert message.stop_reason == "model_context_window_exceeded"


def test_count_tokens(client: anthropic.Anthropic) -> None:
    given = ask("say:x", system="Be brief.")
    usage = client.messages.create(**given).usage
    del given["max_tokens"]
    counted = client.messages.count_tokens(**given)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not served"),
        ({"messages": [user([{"type": "image", "source": {"type": "url", "url": "x"}}])]},
         anthropic.BadRequestError, "messages[0].content[0].type 'image' is not supported"),
        ({"messages": [user("x" * 3000)]}, anthropic.BadRequestError, "maximum context length"),
        ({"tools": [WEATHER]}, anthropic.BadRequestError, "no form of tool calls"),
        ({"extra_body": {"stop": "x"}}, anthropic.BadRequestError, "Unknown parameter 'stop'"),
    ],
)  # fmt: skip
def test_refusals_become_the_right_exceptions(
    client: anthropic.Anthropic, change: dict[str, Any], kind: type, said: str
) -> None:
    with pytest.raises(kind) as caught:
        client.messages.create(**(ask("hi") | change))
    assert said in caught.value.body["error"]["message"]


def test_a_failing_request(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(**ask("fail: soon"))
    with pytest.raises(anthropic.APIStatusError) as caught:
        for _ in client.messages.create(**ask("fail: soon"), stream=True):
            pass
    assert caught.value.body["error"]["type"] == "api_error"


def test_keys_and_a_full_queue() -> None:
    with fake_server(["--key", "secret"], ["--max-running", "0"]) as running:
        with pytest.raises(anthropic.AuthenticationError):
            client_of(running, api_key="wrong").messages.create(**ask("hi"))
        for client in (
            client_of(running, api_key="secret"),
            client_of(running, api_key=None, auth_token="secret"),
        ):
            for stream in (False, True):
                with pytest.raises(anthropic.RateLimitError) as caught:
                    client.messages.create(**ask("hi"), stream=stream)
                assert caught.value.response.headers["retry-after"] == "2"


def test_pings_go_unnoticed() -> None:
    with fake_server(["--keep-alive", "0.04"], ["--step-ms", "300"]) as running:
        given = ask("say:ab") | {"max_tokens": 2}
        with client_of(running).messages.stream(**given) as stream:
            assert "".join(stream.text_stream) == "ab"
