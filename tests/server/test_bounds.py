"""Every bound of a request: at it fine, one above it a 400 that names the field; all in OpenAPI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import call, chat_body, eventually, fake_server
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import RequestError, UsageError
from metainfer.engine.protocol import EngineStats
from metainfer.server.app import create_app, new_state
from metainfer.server.bodies import convert
from metainfer.server.bounds import BOUNDS, Bounds
from metainfer.server.schemas import ChatRequest
from metainfer.server.state import ServerConfig

TEXT = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


#: bound -> a body with N of it
BODIES: dict[str, Any] = {
    "messages": lambda n: {"messages": [TEXT] * n},
    "tools": lambda n: {"tools": [TOOL] * n},
    "stop": lambda n: {"stop": ["x"] * n},
    "stop_chars": lambda n: {"stop": ["a", "x" * n]},
    "n": lambda n: {"n": n},
    "top_logprobs": lambda n: {"top_logprobs": n},
    "logit_bias": lambda n: {"logit_bias": {str(i): 1 for i in range(n)}},
    "cache_salt": lambda n: {"cache_salt": "x" * n},
    "regex_chars": lambda n: {"guided_regex": "x" * n},
    "schema_chars": lambda n: {"guided_json": {"title": "x" * (n - len('{"title":""}'))}},
    "schema_depth": lambda n: {"guided_json": nested(n)},
}


def body(**extra: Any) -> ChatRequest:
    return convert({"model": "m", "messages": [TEXT], **extra}, ChatRequest)


def test_every_bound_has_a_body_here() -> None:
    assert set(BODIES) | {"answer_tokens"} == {bound.name for bound in BOUNDS}


@pytest.mark.parametrize("name", BODIES)
def test_the_default_holds_exactly(name: str) -> None:
    default = Bounds()[name]
    bounds = Bounds()
    bounds.check(body(**BODIES[name](default)))
    if name.startswith("schema"):  # the default is what grammars hold anyway
        bounds = Bounds({name: default - 1})
        default -= 1
    try:
        above = body(**BODIES[name](default + 1))
    except RequestError as error:  # the ceiling of the types
        caught = error
    else:
        with pytest.raises(RequestError) as found:
            bounds.check(above)
        caught = found.value
    assert (caught.status, caught.code) == (400, "invalid_value")
    field = next(bound.field for bound in BOUNDS if bound.name == name)
    assert (caught.param or "").startswith(field)


@given(st.sampled_from(sorted(BODIES)), st.integers(1, 20), st.integers(1, 24))
def test_what_the_operator_chose_holds(name: str, most: int, asked: int) -> None:
    low = len('{"title":""}') if name == "schema_chars" else 0
    bounds = Bounds({name: low + most})
    wanted = body(**BODIES[name](low + asked)) if asked <= 20 or name != "top_logprobs" else None
    if wanted is None:
        return
    if asked <= most:
        bounds.check(wanted)
        return
    with pytest.raises(RequestError) as caught:
        bounds.check(wanted)
    assert str(low + most) in caught.value.cause


def test_bounds_that_do_not_exist_or_cannot_be() -> None:
    with pytest.raises(UsageError, match="Did you mean messages"):
        Bounds({"mesages": 1})
    for name, value in (("n", 257), ("n", -1), ("top_logprobs", 21)):
        with pytest.raises(UsageError, match="out of range"):
            Bounds({name: value})
    assert dict(Bounds({"n": 256}))["n"] == 256


def test_schemas_of_tools_are_bounded_too() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(9)}}
    Bounds({"schema_depth": 9}).check(body(tools=[tool]))
    with pytest.raises(RequestError) as caught:
        Bounds({"schema_depth": 8}).check(body(tools=[tool]))
    assert caught.value.param == "tools[0].function.parameters"


def test_all_of_them_are_in_the_document() -> None:
    chosen = {bound.name: max(bound.default // 2, 1) for bound in BOUNDS}
    config = ServerConfig(("m",), bounds=Bounds(chosen), max_body_bytes=12345, max_headers=77)
    client = SimpleNamespace(stats=EngineStats(), alive=True)
    document = create_app(new_state(config, client)).app.openapi()  # type: ignore[arg-type]
    listed = {name: row["limit"] for name, row in document["x-metainfer-limits"].items()}
    assert listed == {"body": 12345, "headers": 77, **chosen}
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]

    def said(field: str, keyword: str) -> set[int]:
        options = fields[field].get("anyOf", [fields[field]])
        options += [option["items"] for option in options if "items" in option]
        return {option[keyword] for option in options if keyword in option}

    for bound in BOUNDS:
        if bound.keyword:
            assert said(bound.field, bound.keyword) == {chosen[bound.name]}, bound.name


def test_over_http_with_one_queue_rule_and_a_measured_wait() -> None:
    server = ["--limit", "n=2", "--limit", "answer_tokens=100", "--max-pending", "3"]
    with fake_server(server, ["--step-ms", "5"]) as running:

        def ask(**extra: Any) -> Any:
            return call(running.port, "POST", "/v1/chat/completions", chat_body("hi", **extra))

        over = ask(n=3)
        assert (over.status, over.json["error"]["param"]) == (400, "n")
        assert "at most 2" in over.json["error"]["message"]
        total = ask(n=2, max_tokens=51)
        assert (total.status, total.json["error"]["param"]) == (400, "max_tokens")
        assert "102" in total.json["error"]["message"]
        assert ask(n=2, max_tokens=50).status == 200
        for _ in range(3):
            assert ask(max_tokens=4).status == 200
        prompts = {"model": "fake", "prompt": ["a"] * 4, "max_tokens": 1}
        full = call(running.port, "POST", "/v1/completions", prompts)
        assert (full.status, full.json["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(full.headers["retry-after"]) <= 60
        assert eventually(lambda: call(running.port, "GET", "/health").json["pending"] == 0)


def test_one_of_many_messages_is_named_as_one_of_few_is() -> None:
    for count in (3, 90):
        bad = [TEXT] * (count - 1) + [{"role": "user", "content": [{"type": "text", "text": 5}]}]
        with pytest.raises(RequestError) as caught:
            body(messages=bad)
        assert caught.value.param == f"messages[{count - 1}].content[0].text"
        assert caught.value.code == "invalid_type"
        assert body(messages=[TEXT] * count).messages[-1].content == "x"


def test_too_many_are_refused_before_they_are_read() -> None:
    for field in ("messages", "tools"):
        with pytest.raises(RequestError) as caught:
            Bounds({field: 2}).check_counts({field: [None] * 3})
        assert caught.value.param == field
    Bounds({"messages": 2}).check_counts({"messages": [None] * 2, "tools": "no list"})
