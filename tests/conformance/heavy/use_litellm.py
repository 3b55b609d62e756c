"""litellm as a library: its OpenAI, hosted_vllm and Anthropic providers, its Responses bridge."""

from __future__ import annotations

import json
import os
from typing import Any

REQUIRES = ["litellm>=1.110"]
REPORTS = ["litellm", "openai"]
SERVER = ["--context", "2048", "--concurrency", "4"]

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one from the network

import checks  # noqa: E402
import litellm  # noqa: E402

V1 = f"{checks.URL}/v1"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def openai(**more: Any) -> Any:
    given = {"model": f"openai/{checks.MODEL}", "api_base": V1, "api_key": "x", "messages": ASK}
    return litellm.completion(**(given | {"max_tokens": 24, "temperature": 0} | more))


def check_completion() -> str:
    """A chat answer with usage that adds up."""
    answer = openai()
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    text = answer.choices[0].message.content
    assert text
    return text


def check_stream() -> None:
    """The streamed answer is the whole one, with usage at its end."""
    whole = openai()
    text, usage = "", None
    for chunk in openai(stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = getattr(chunk, "usage", None) or usage
    assert text == whole.choices[0].message.content, text
    assert usage.completion_tokens == whole.usage.completion_tokens


def check_hosted_vllm() -> None:
    """The provider that people use for vLLM gets the same answer."""
    answer = openai(model=f"hosted_vllm/{checks.MODEL}")
    assert answer.choices[0].message.content == openai().choices[0].message.content


def check_tool_choice_required() -> str:
    """A required call comes with arguments that fit the schema, streamed and whole."""
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    answer = openai(**asked, max_tokens=100)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"city"}
    chunks = list(openai(**asked, max_tokens=100, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    (streamed,) = built.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    return call.function.arguments


def check_json_schema() -> str:
    """`response_format` with a schema is honoured."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": PARAMETERS}}
    answer = openai(response_format=form, max_tokens=100)
    text = answer.choices[0].message.content
    assert set(json.loads(text)) == {"city"}
    return text


def check_text_completion() -> None:
    """The legacy route with log-probabilities."""
    answer = litellm.text_completion(
        model=f"text-completion-openai/{checks.MODEL}", api_base=V1, api_key="x",
        prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=2,
    )  # fmt: skip
    assert answer.choices[0].text.strip()


def check_errors() -> None:
    """Refusals arrive as litellm's own classes."""
    for change, kind in (
        ({"model": "openai/other"}, litellm.NotFoundError),
        ({"max_tokens": 99999}, litellm.ContextWindowExceededError),
        ({"temperature": -1}, litellm.BadRequestError),
    ):
        try:
            openai(**change, num_retries=0)
        except kind:
            continue
        raise AssertionError(f"{change} raised no {kind.__name__}")


def responses(**more: Any) -> Any:
    given = {"model": f"openai/{checks.MODEL}", "api_base": V1, "api_key": "x", "input": "Say hi."}
    return litellm.responses(**(given | {"max_output_tokens": 12, "temperature": 0} | more))


def check_responses() -> None:
    """`/v1/responses` through litellm, whole and streamed to the same text."""
    answer = responses()
    text = answer.output[0].content[0].text
    events = list(responses(stream=True))
    last = events[-1].response
    assert events[-1].type in ("response.completed", "response.incomplete"), events[-1].type
    assert last.output[0].content[0].text == text
    assert last.usage.output_tokens == answer.usage.output_tokens


def anthropic(**more: Any) -> Any:
    given = {"model": f"anthropic/{checks.MODEL}", "api_base": checks.URL, "api_key": "x"}
    given |= {"messages": ASK, "max_tokens": 24, "temperature": 0}
    return litellm.completion(**(given | more))


def check_anthropic_provider() -> str:
    """litellm as a client of `/v1/messages`, whole and streamed."""
    answer = anthropic()
    text = answer.choices[0].message.content
    assert text == openai().choices[0].message.content
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in anthropic(stream=True) if chunk.choices
    )
    assert streamed == text
    return text


def check_anthropic_provider_tools() -> str:
    """An enforced call through `/v1/messages`."""
    answer = anthropic(
        tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=100
    )
    (call,) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}
    return call.function.arguments


if __name__ == "__main__":
    checks.run(dict(globals()))
