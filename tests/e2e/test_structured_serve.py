"""Structured output through the real server with OpenAI's client, as people use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from served import Server
from test_serve import MODEL, serving


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    kind: Literal["a", "é", "日本"]
    nick: str | None = Field(max_length=4)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--concurrency", "8", "--draft", "ngram:3") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="x", max_retries=20) as client:
        yield client


MESSAGES = [{"role": "user", "content": "Who?"}]


def test_parse(client: openai.OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Person, seed=seed, max_tokens=300
        )  # type: ignore[call-overload]
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)


def test_parse_while_streaming(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Person, seed=3, max_tokens=300
    ) as stream:  # type: ignore[call-overload]
        for _ in stream:
            pass
        final = stream.get_final_completion()
    whole = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Person, seed=3, max_tokens=300
    )  # type: ignore[call-overload]
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed is not None


def test_other_spellings(client: openai.OpenAI) -> None:
    def said(**fields: object) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=1, max_tokens=400, extra_body=fields
        )  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "stop"
        return str(answer.choices[0].message.content)

    assert said(guided_choice=["ja", "nein"]) in ("ja", "nein")
    assert said(structured_outputs={"regex": "[0-9]{3}-é"}).endswith("-é")
    assert json.loads(said(guided_json=json.dumps({"enum": [{"a": [1]}]}))) == {"a": [1]}
    legacy = client.completions.create(
        model=MODEL, prompt="x", n=3, max_tokens=50, extra_body={"guided_choice": ["ja", "nein"]}
    )
    assert {choice.text for choice in legacy.choices} <= {"ja", "nein"}


def test_a_bad_schema_is_the_clients_fault(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,  # type: ignore[arg-type]
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "foo"}},
            },
        )
    assert error.value.code == "invalid_schema" and "foo" in str(error.value)


def test_the_other_library_behind_the_same_server() -> None:
    """Chosen by a flag, shown in the plan, asked by the checking process too."""
    with serving("--concurrency", "4", "--grammar-backend", "xgrammar") as running:
        plan = httpx.get(f"{running.base}/plan").json()
        assert plan["plan"]["grammar"] == "xgrammar"
        (decision,) = [one for one in plan["decisions"] if one["key"] == "grammar"]
        assert [loser["value"] for loser in decision["losers"]] == ["llguidance"]
        with openai.OpenAI(base_url=f"{running.base}/v1", api_key="x", max_retries=20) as client:
            answer = client.chat.completions.parse(
                model=MODEL, messages=MESSAGES, response_format=Person, seed=1, max_tokens=300
            )  # type: ignore[call-overload]
            assert isinstance(answer.choices[0].message.parsed, Person)
            with pytest.raises(openai.BadRequestError) as error:
                client.completions.create(
                    model=MODEL,
                    prompt="x",
                    extra_body={"guided_json": {"type": "integer", "multipleOf": 3}},
                )
            assert "xgrammar does not enforce 'multipleOf'" in str(error.value)
