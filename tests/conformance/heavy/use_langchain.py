"""langchain-openai: chat, streams, bound tools, structured output, the Responses API."""

from __future__ import annotations

from typing import Any

REQUIRES = ["langchain-openai>=1.7"]
REPORTS = ["langchain-openai", "langchain-core", "openai"]
SERVER = ["--context", "2048", "--concurrency", "4"]

import checks  # noqa: E402
import openai  # noqa: E402
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI, OpenAI  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402

ASK = "What is the capital of France?"


def chat(**more: Any) -> ChatOpenAI:
    given = {"model": checks.MODEL, "base_url": f"{checks.URL}/v1", "api_key": "x"}
    given |= {"temperature": 0, "max_tokens": 100, "max_retries": 0}
    return ChatOpenAI(**(given | more))


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"It rains in {city}."


def check_invoke() -> str:
    """A chat answer with usage metadata."""
    answer = chat(max_tokens=24).invoke(ASK)
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["model_name"] == checks.MODEL
    return answer.content


def check_stream() -> None:
    """The streamed chunks add up to the whole answer, usage included."""
    model = chat(max_tokens=24, stream_usage=True)
    whole = model.invoke(ASK)
    total = None
    for chunk in model.stream(ASK):
        total = chunk if total is None else total + chunk
    assert total.content == whole.content
    assert total.usage_metadata == whole.usage_metadata


def check_batch() -> None:
    """Four requests at once give what one gives."""
    model = chat(max_tokens=12)
    assert len({answer.content for answer in model.batch([ASK] * 4)}) == 1


def check_tools() -> Any:
    """A bound tool with a required choice is called; its result is taken back."""
    model = chat().bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    first = model.invoke(ASK)
    (call,) = first.tool_calls
    assert call["name"] == "weather" and set(call["args"]) == {"city"}
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    rest = chat(max_tokens=24).bind_tools([weather], tool_choice="none")
    assert rest.invoke([HumanMessage(ASK), first, result]).content
    return call["args"]


def check_streamed_tools() -> None:
    """The same call in chunks."""
    model = chat().bind_tools([weather], tool_choice="weather")
    total = None
    for chunk in model.stream(ASK):
        total = chunk if total is None else total + chunk
    assert [call["name"] for call in total.tool_calls] == ["weather"]


def check_structured_output() -> Any:
    """`with_structured_output` in its three methods."""
    found = {}
    for method in ("json_schema", "function_calling", "json_mode"):
        model = chat().with_structured_output(City, method=method, include_raw=True)
        said = model.invoke("Name a city as JSON with the key name.")
        if method != "json_mode":  # there any object may come
            assert isinstance(said["parsed"], City), said
        assert said["raw"].content or said["raw"].tool_calls
        found[method] = None if said["parsed"] is None else said["parsed"].name
    return found


def check_responses_api() -> str:
    """The Responses API as langchain speaks it, whole and streamed."""
    model = chat(max_tokens=24, use_responses_api=True)
    answer = model.invoke(ASK)
    total = None
    for chunk in model.stream(ASK):
        total = chunk if total is None else total + chunk
    assert total.text == answer.text and answer.text
    assert answer.usage_metadata["output_tokens"] == total.usage_metadata["output_tokens"]
    return answer.text


def check_responses_api_tools() -> None:
    """A call through the Responses API, and its result sent back as items."""
    model = chat(use_responses_api=True).bind_tools([weather], tool_choice="required")
    first = model.invoke(ASK)
    assert first.tool_calls
    results = [weather.invoke(call) for call in first.tool_calls]
    rest = chat(max_tokens=24, use_responses_api=True).bind_tools([weather], tool_choice="none")
    assert rest.invoke([HumanMessage(ASK), first, *results]).text


def check_completions() -> str:
    """The legacy route."""
    model = OpenAI(
        model=checks.MODEL, base_url=f"{checks.URL}/v1", api_key="x", max_tokens=8, temperature=0
    )
    return model.invoke("The capital of France is")


def check_errors() -> None:
    """A refusal is the client's own exception."""
    try:
        chat(model="other").invoke(ASK)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("another model was served")


if __name__ == "__main__":
    checks.run(dict(globals()))
