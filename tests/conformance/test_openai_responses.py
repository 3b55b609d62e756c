"""OpenAI's own client and types against ``/v1/responses``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from fake_server import Running, call, fake_server
from fake_texts import write_script
from openai.types.responses import Response, ResponseStreamEvent

EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
SAID = {
    "call": f"<think>\nI must look.\n</think>\n\nOne moment.\n{CALL}",
    "json": '{"city": "Łódź", "degrees": 3}',
    "text": "It rains.",
}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: Any) -> Iterator[openai.OpenAI]:
    script = write_script(tmp_path_factory.mktemp("s") / "script.json", "qwen", SAID)
    steps = ["--script", str(script), "--tokens-per-step", "2"]
    with fake_server(["--text", "qwen"], steps) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)


def strict(body: Any) -> Response:
    """`body` by the types themselves, which do not forgive what the client forgives."""
    return Response.model_validate(body.model_dump(mode="json", warnings="error"))


def test_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="fake", input="say:héllo ☃", instructions="Be brief.", metadata={"a": "b"}
    )
    strict(answer)
    assert answer.output_text == "héllo ☃"
    assert (answer.status, answer.object, answer.metadata) == ("completed", "response", {"a": "b"})
    prompt = len(b"system: Be brief.\nuser: ") + len("say:héllo ☃\nassistant: ".encode())
    assert answer.usage.input_tokens == prompt
    assert answer.usage.input_tokens_details.cached_tokens == prompt // 16 * 16
    assert answer.usage.output_tokens == len("héllo ☃".encode())


def test_stream(client: openai.OpenAI) -> None:
    found = []
    for event in client.responses.create(model="fake", input="say:naïve ☃", stream=True):
        EVENTS.validate_python(event.model_dump(mode="json"))
        found.append(event)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "naïve ☃" and len(deltas) > 5
    assert found[-1].type == "response.completed"
    assert found[-1].response.output_text == "naïve ☃"


def test_the_streaming_helper_ends_with_the_answer(scripted: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "fake", "input": "play:call;", "tools": [WEATHER]}
    with scripted.responses.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.output_item.added") == 3
    assert kinds.count("response.output_item.done") == 3
    whole = strict(scripted.responses.create(**ask))
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    for streamed, made in zip(final.output, whole.output, strict=True):
        unlike = {
            "id": True,
            "call_id": True,
            "parsed_arguments": True,
            "content": {"__all__": {"parsed"}},
        }
        one, other = (
            item.model_dump(exclude_none=True, exclude=unlike) for item in (streamed, made)
        )
        assert one == other
    assert final.output[2].parsed_arguments is None
    assert json.loads(final.output[2].arguments) == {"city": "Łódź"}


def test_a_round_of_tools(scripted: openai.OpenAI) -> None:
    """Items go back as they came, as the documentation's loop does it."""
    items: list[Any] = [{"role": "user", "content": "play:call;"}]
    answer = scripted.responses.create(model="fake", input=items, tools=[WEATHER])
    items += answer.output
    made = answer.output[-1]
    assert made.type == "function_call" and made.name == "weather"
    items.append({"type": "function_call_output", "call_id": made.call_id, "output": "play:text;"})
    answer = scripted.responses.create(model="fake", input=items, tools=[WEATHER], store=False)
    assert strict(answer).output_text == "It rains."


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


def test_parse(scripted: openai.OpenAI) -> None:
    answer = scripted.responses.parse(model="fake", input="play:json;", text_format=Weather)
    assert answer.output_parsed == Weather(city="Łódź", degrees=3)
    items: list[Any] = [*answer.output, {"role": "user", "content": "play:text;"}]
    assert scripted.responses.create(model="fake", input=items).output_text == "It rains."
    with scripted.responses.stream(model="fake", input="play:json;", text_format=Weather) as stream:
        assert stream.get_final_response().output_parsed == Weather(city="Łódź", degrees=3)


def test_a_cut_answer(client: openai.OpenAI) -> None:
    answer = strict(client.responses.create(model="fake", input="go on", max_output_tokens=4))
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = client.responses.create(model="fake", input="go on", max_output_tokens=4, stream=True)
    *_, last = stream
    assert last.type == "response.incomplete" and last.response.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("change", "kind", "code", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "unsupported_parameter",
         "previous_response_id"),
        ({"background": True}, openai.BadRequestError, "unsupported_parameter", "background"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "unsupported_parameter",
         "tools[0].type"),
        ({"max_output_tokens": 5000}, openai.BadRequestError, "context_length_exceeded", "input"),
        ({"extra_body": {"inptu": 1}}, openai.BadRequestError, "unknown_parameter", "inptu"),
    ],
)  # fmt: skip
def test_refusals_become_the_right_exceptions(
    client: openai.OpenAI, change: dict[str, Any], kind: type, code: str, param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.responses.create(**({"model": "fake", "input": "hi"} | change))
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_stream_that_fails_is_a_failed_response(client: openai.OpenAI) -> None:
    *_, last = client.responses.create(model="fake", input="fail: soon", stream=True)
    EVENTS.validate_python(last.model_dump(mode="json"))
    assert last.type == "response.failed"
    assert last.response.error.code == "server_error"
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="fake", input="fail: soon")
    assert caught.value.code == "engine_error"


def test_nothing_is_kept(server: Running, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="say:x")
    assert call(server.port, "POST", "/v1/responses", {"model": "fake", "input": "x"}).json[
        "store"
    ] is False  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
