"""What requests may say: the page is what the code says; other servers' fields are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_server import Running, call, chat_body

from metainfer.core.errors import RequestError
from metainfer.server import surface
from metainfer.server.bodies import convert
from metainfer.server.schemas import INSTEAD, UNSUPPORTED, ChatRequest

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
CHAT = "/v1/chat/completions"

#: serving.md 1.2, by the names that clients of the rows use
ROWS = (
    "stop", "stop_token_ids", "stop_regex", "no_stop_trim", "logprobs", "top_logprobs",
    "prompt_logprobs", "logprob_token_ids", "n", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "min_p", "top_k", "min_tokens", "min_new_tokens",
    "ignore_eos", "bad_words", "allowed_token_ids", "response_format", "structured_outputs",
    "regex", "ebnf", "grammar", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort",
    "thinking_token_budget", "stream_options", "priority", "cache_salt", "chat_template_kwargs",
    "chat_template", "return_token_ids", "session_id", "request_id", "repetition_detection",
    "max_tokens", "max_completion_tokens",
)  # fmt: skip


def test_the_page_is_current() -> None:
    """`python -m metainfer.server.surface > docs/api.md`"""
    assert PAGE.read_text() == surface.text()


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_honoured_or_refused_by_name(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text()
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], name: [{"odd": 0.5}]}
    if name == "session_id":
        convert(body, ChatRequest)  # a hint
        return
    try:
        convert(body, ChatRequest)
    except RequestError as error:
        assert (error.code, error.param) != ("unknown_parameter", name)
        assert (error.param or "").startswith(name)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_neutral_values_are_accepted_and_others_refused_with_a_way(name: str) -> None:
    known = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for value in UNSUPPORTED[name]:
        convert({**known, name: value}, ChatRequest)
    with pytest.raises(RequestError) as caught:
        convert({**known, name: {"something": 1}}, ChatRequest)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)
    assert caught.value.remedy == INSTEAD.get(name, "Leave it out.")


def test_bad_words_and_allowed_ids_reach_the_engine_as_ids(server: Running) -> None:
    body = chat_body("say:ok", bad_words=["no", " way"], allowed_token_ids=[111, 107])
    assert call(server.port, "POST", CHAT, body).status == 200
    line = next(x for x in reversed(server.lines()) if x.startswith("submit") and "bad_words" in x)
    params = json.loads(line.split(" ", 2)[2])
    assert params["allowed_token_ids"] == [111, 107]
    spelled = {bytes(word).decode() for word in params["bad_words"]}
    assert spelled == {"no", " no", " way"}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "no"}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
    ],
)
def test_bad_ones_are_400s(server: Running, extra: dict[str, object], param: str) -> None:
    answer = call(server.port, "POST", CHAT, chat_body("hi", **extra))
    assert answer.status == 400 and answer.json["error"]["param"].startswith(param)
