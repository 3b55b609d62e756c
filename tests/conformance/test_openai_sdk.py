"""OpenAI's own client and types against the server."""

from __future__ import annotations

import openai
import pytest
from fake_engine import reply_text
from fake_server import Running, call, chat_body, events, fake_server
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def prompt_of(text: str) -> str:
    return f"user: {text}\nassistant: "


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=ask("say:héllo ☃"))
    assert answer.choices[0].message.content == "héllo ☃"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(prompt_of("say:héllo ☃").encode())
    assert answer.usage.completion_tokens == len("héllo ☃".encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 16 * 16
    assert answer.system_fingerprint == "fp_fake0123"


def test_chat_stream_equals_answer(client: openai.OpenAI) -> None:
    parts, finish, usage = [], None, None
    stream = client.chat.completions.create(
        model="fake",
        messages=ask("say:naïve ☃ text"),
        stream=True,
        stream_options={"include_usage": True},
    )
    roles = 0
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        assert chunk.usage is None
        delta = chunk.choices[0].delta
        roles += delta.role == "assistant"
        parts.append(delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    assert "".join(parts) == "naïve ☃ text"
    assert (roles, finish) == (1, "stop")
    assert usage is not None and usage.completion_tokens == len("naïve ☃ text".encode())


def test_length_and_seed(client: openai.OpenAI) -> None:
    for seed in (0, 5):
        answer = client.chat.completions.create(
            model="fake", messages=ask("hi"), max_completion_tokens=40, seed=seed
        )
        assert answer.choices[0].message.content == reply_text(prompt_of("hi"), 40, seed)
        assert answer.choices[0].finish_reason == "length"


def test_n_seeds_count_up(client: openai.OpenAI) -> None:
    for stream in (False, True):
        got = client.chat.completions.create(
            model="fake", messages=ask("hi"), n=3, max_tokens=9, seed=7, stream=stream
        )
        texts = ["", "", ""]
        for answer in got if stream else [got]:
            for choice in answer.choices:
                piece = choice.delta if stream else choice.message
                texts[choice.index] += piece.content or ""
        assert texts == [reply_text(prompt_of("hi"), 9, 7 + i) for i in range(3)]


def test_stop_string_across_tokens(client: openai.OpenAI, server: Running) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=ask("say:one END two"), stop=["END", "never"]
    )
    assert answer.choices[0].message.content == "one "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("one END")
    unstopped = client.chat.completions.create(
        model="fake", messages=ask("say:one EN"), stop=["END"]
    )
    assert unstopped.choices[0].message.content == "one EN"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=ask("say:ab"), logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [item.token for item in content] == ["a", "b"]
    assert [item.bytes for item in content] == [[97], [98]]
    assert all(item.logprob == -0.25 and len(item.top_logprobs) == 2 for item in content)
    streamed = client.chat.completions.create(
        model="fake", messages=ask("say:ab"), logprobs=True, top_logprobs=2, stream=True
    )
    found = []
    for chunk in streamed:
        if chunk.choices[0].logprobs:
            found += chunk.choices[0].logprobs.content
    assert found == content


def test_completions_of_every_prompt_form(client: openai.OpenAI) -> None:
    ids = list(b"say:xyz")
    for prompt in ("say:xyz", ["say:xyz"], ids, [ids]):
        answer = client.completions.create(model="fake", prompt=prompt)
        assert [choice.text for choice in answer.choices] == ["xyz"]
        assert answer.usage.prompt_tokens == 7
    both = client.completions.create(model="fake", prompt=["say:one", "say:two"], n=2)
    assert [choice.text for choice in both.choices] == ["one", "one", "two", "two"]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage.prompt_tokens == 14
    assert both.usage.completion_tokens == 12


def test_completions_default_is_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="go on")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_completions_echo_with_logprobs(client: openai.OpenAI) -> None:
    """What lm-eval's multiple choice needs: the prompt's own log-probabilities."""
    answer = client.completions.create(
        model="fake", prompt=list(b"say:ab"), echo=True, max_tokens=1, logprobs=1
    )
    block = answer.choices[0].logprobs
    assert answer.choices[0].text == "say:aba"
    assert block.tokens == list("say:aba")
    assert block.token_logprobs == [None, *[-0.25] * 6]
    assert block.text_offset == list(range(7))
    assert block.top_logprobs[0] is None and block.top_logprobs[1] == {"a": -0.25}
    only = client.completions.create(
        model="fake", prompt="say:ab", echo=True, max_tokens=0, logprobs=0
    )
    assert only.choices[0].text == "say:ab"
    assert only.choices[0].logprobs.top_logprobs is None
    assert len(only.choices[0].logprobs.tokens) == 6


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_bodies_pass_the_clients_strict_types(server: Running) -> None:
    """The client is lenient; its types are not."""
    rich = {"logprobs": True, "top_logprobs": 3, "n": 2, "max_tokens": 5, "stop": ["zz"]}
    answer = call(server.port, "POST", "/v1/chat/completions", chat_body("hi", **rich)).json
    ChatCompletion.model_validate(answer)
    raw = call(
        server.port,
        "POST",
        "/v1/chat/completions",
        chat_body("hi", stream=True, stream_options={"include_usage": True}, **rich),
    ).raw
    *chunks, done = events(raw)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])  # null, not absent
    assert chunks[-1]["usage"]["completion_tokens"] == 10 and chunks[-1]["choices"] == []
    bare = events(
        call(
            server.port, "POST", "/v1/chat/completions", chat_body("a", stream=True, max_tokens=2)
        ).raw
    )
    assert all("usage" not in chunk for chunk in bare[:-1])
    always = {"include_usage": False, "continuous_usage_stats": True}
    body = chat_body("a", stream=True, max_tokens=2, stream_options=always)
    counts = [
        chunk["usage"]["completion_tokens"]
        for chunk in events(call(server.port, "POST", "/v1/chat/completions", body).raw)[:-1]
    ]
    assert counts == sorted(counts) and counts[-1] == 2
    # (with echo the first token's log-probability is null, as in the real API; the types lag)
    body = {"model": "fake", "prompt": ["a", "b"], "logprobs": 2}
    Completion.model_validate(call(server.port, "POST", "/v1/completions", body).json)
    for chunk in events(call(server.port, "POST", "/v1/completions", body | {"stream": True}).raw)[
        :-1
    ]:
        for choice in chunk["choices"]:  # null until the end, as in the real API; the types lag
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(chunk)
    for model in call(server.port, "GET", "/v1/models").json["data"]:
        Model.model_validate(model)


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 5000}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]},
         openai.BadRequestError, "unsupported_parameter"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "unknown_parameter"),
    ],
)  # fmt: skip
def test_errors_become_the_right_exceptions(
    client: openai.OpenAI, change: dict, kind: type, code: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**({"model": "fake", "messages": ask("hi")} | change))
    assert caught.value.code == code


def test_context_error_states_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x" * 2000, max_tokens=100)
    for number in ("2048", "2100", "2000", "100", "52"):
        assert number in caught.value.message


def test_a_failing_request_is_an_error_alone(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="fake", prompt="fail: at token two")
    assert caught.value.code == "engine_error"
    with pytest.raises(openai.APIError) as caught:
        for _ in client.completions.create(model="fake", prompt="fail: now", stream=True):
            pass
    assert caught.value.code == "engine_error"


def test_auth_and_full_queue() -> None:
    with fake_server(["--key", "secret", "--max-pending", "2"]) as running:
        base = f"{running.url}/v1"
        with pytest.raises(openai.AuthenticationError) as caught:
            openai.OpenAI(base_url=base, api_key="wrong", max_retries=0).models.list()
        assert caught.value.code == "invalid_api_key"
        client = openai.OpenAI(base_url=base, api_key="secret", max_retries=0)
        assert client.models.list().data
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="fake", messages=ask("hi"), n=3)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
    with fake_server(engine=["--max-running", "1", "--step-ms", "20"]) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
        busy = client.chat.completions.create(
            model="fake", messages=ask("hi"), max_tokens=2000, stream=True
        )
        next(iter(busy))
        for stream in (False, True):  # the scheduler's refusal has a status in a stream, too
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="fake", messages=ask("hi"), stream=stream)
            assert caught.value.response.headers["retry-after"] == "2"
        busy.close()
