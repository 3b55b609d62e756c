"""Text of one choice, whatever the cut into outputs: text, stops, counts, alignment."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import InternalError, RequestError
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.core.step import RequestOutput, TokenLogprobs
from metainfer.engine.model_text import byte_deepseek, byte_text
from metainfer.engine.text_stream import (
    Delta,
    LegacyLogprobs,
    TextStream,
    chat_logprobs,
    expand,
)
from metainfer.text.dialogue import Prompt
from metainfer.text.markup import Opening

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))

from transcripts import DSML, Transcript

TOKENIZER = byte_text(300).tokenizer


def outputs(tokens: Sequence[int], sizes: Sequence[int], logprobs: bool) -> list[RequestOutput]:
    found, at = [], 0
    for size in [*sizes, len(tokens)]:
        part = tuple(tokens[at : at + size])
        at += len(part)
        entries = tuple(TokenLogprobs(t, -float(t), ((t, -1.0),)) for t in part) if logprobs else ()
        over = at == len(tokens)
        finish = FinishReason.LENGTH if over else None
        found.append(RequestOutput("r", part, at - len(part), entries, finish=finish))
        if over:
            break
    return found


def run(stream: TextStream, given_outputs: Sequence[RequestOutput]) -> list[Delta]:
    found = []
    for output in given_outputs:
        found.append(stream.push(output))
        if found[-1].finish is not None:
            break
    return found


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab☃é ", max_size=30),
    stops=st.lists(st.text(alphabet="ab☃é ", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(0, 6), max_size=30),
    logprobs=st.booleans(),
)
def test_text_does_not_depend_on_the_cut(
    text: str, stops: list[str], sizes: list[int], logprobs: bool
) -> None:
    tokens = TOKENIZER.encode(text)
    params = SamplingParams(logprobs=1 if logprobs else None)
    stream = TextStream(TOKENIZER, stops, params=params)
    got = run(stream, outputs(tokens, sizes, logprobs))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        end = min(ends)
        start = min(end - len(s) for s in stops if s in text and text.find(s) + len(s) == end)
        assert "".join(delta.text for delta in got) == text[:start]
        assert got[-1].finish == stream.finish == "stop"
        assert stream.completion_tokens == len(text[:end].encode())
    else:
        assert "".join(delta.text for delta in got) == text
        assert got[-1].finish == stream.finish == "length"
        assert stream.completion_tokens == len(tokens)
    shown = [token for delta in got for token in delta.tokens]
    assert shown == tokens[: len(shown)] and len(shown) == stream.completion_tokens
    if logprobs:
        assert [entry.token for delta in got for entry in delta.logprobs] == shown
        starts = [start for delta in got for start in delta.starts]
        assert len(starts) == len(shown) and starts == sorted(starts)


def test_starts_are_character_offsets() -> None:
    stream = TextStream(TOKENIZER, params=SamplingParams(logprobs=0))
    got = run(stream, outputs(TOKENIZER.encode("a☃b"), [1, 1, 1, 1], True))
    assert [start for delta in got for start in delta.starts] == [0, 1, 1, 1, 2]


def test_nothing_is_held_without_need() -> None:
    stream = TextStream(TOKENIZER, ["END"], params=SamplingParams())
    texts = [delta.text for delta in run(stream, outputs(list(b"xxENxEN"), [1] * 6, False))]
    assert texts == ["x", "x", "", "", "ENx", "", "EN"]


def test_stop_strings_wait_for_min_tokens() -> None:
    for least, expected in ((0, ""), (1, ""), (4, "abc"), (6, "abcabc")):
        stream = TextStream(TOKENIZER, ["a"], params=SamplingParams(min_tokens=least))
        got = run(stream, outputs(list(b"abcabc"), [2, 2], False))
        assert "".join(delta.text for delta in got) == expected, least


def test_stop_token_ends_without_text() -> None:
    stream = TextStream(TOKENIZER, ["zz"], params=SamplingParams())
    first = stream.push(RequestOutput("r", (122,), 0))
    last = stream.push(RequestOutput("r", (), 1, finish=FinishReason.STOP, stop_token=256))
    assert (first.text, last.text, last.finish) == ("", "z", "stop")
    assert stream.completion_tokens == 1


def test_incomplete_character_at_the_end_is_shown() -> None:
    stream = TextStream(TOKENIZER, params=SamplingParams())
    got = run(stream, outputs([0xE2, 0x98], [1], False))
    assert "".join(delta.text for delta in got) == "�"


@pytest.mark.parametrize(
    ("finish", "status", "code"),
    [
        (FinishReason.ERROR, 500, "engine_error"),
        (FinishReason.ERROR, 500, "non_finite_logits"),
        (FinishReason.ERROR, 503, "out_of_memory"),
        (FinishReason.CANCELLED, 503, "cancelled"),
    ],
)
def test_engine_side_ends_are_errors(finish: FinishReason, status: int, code: str) -> None:
    stream = TextStream(TOKENIZER, params=SamplingParams())
    with pytest.raises(RequestError) as caught:
        own = "" if code in ("engine_error", "cancelled") else code
        stream.push(RequestOutput("r", (), 0, finish=finish, error="NaN", code=own))
    assert (caught.value.status, caught.value.code) == (status, code)


def test_lost_output_is_noticed() -> None:
    stream = TextStream(TOKENIZER, params=SamplingParams())
    stream.push(RequestOutput("r", (97,), 0))
    with pytest.raises(InternalError):
        stream.push(RequestOutput("r", (97,), 2))


def test_expand() -> None:
    plain = Request("r", (1,), SamplingParams(seed=2**63 - 2))
    got = expand(plain, 4)
    assert [item.request_id for item in got] == ["r-0", "r-1", "r-2", "r-3"]
    assert [item.params.seed for item in got] == [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1]
    free = expand(Request("r", (1,), SamplingParams()), 2)
    assert [item.params.seed for item in free] == [None, None]


def test_logprob_forms_hold_no_infinity_and_keep_the_likelier_text() -> None:
    entry = TokenLogprobs(0xE2, float("-inf"), ((0xE2, -1.0), (0x98, -2.0), (97, -3.0)))
    (item,) = chat_logprobs(TOKENIZER, [entry], 2)
    assert item["logprob"] == -9999.0 and item["bytes"] == [0xE2] and item["token"] == "�"
    assert [other["bytes"] for other in item["top_logprobs"]] == [[0xE2], [0x98]]
    block = LegacyLogprobs()
    block.add(TOKENIZER, entry, token=0xE2, offset=3, top=3)
    assert block.top_logprobs == [{"�": -1.0, "a": -3.0}]
    assert block.text_offset == [3] and block.token_logprobs == [-9999.0]


def test_byte_text_round_trip() -> None:
    rng = random.Random(0)
    for size in (100, 256, 300, 5000):
        tokenizer = byte_text(size).tokenizer
        assert tokenizer.vocab_size == size
    data = bytes(rng.randrange(256) for _ in range(500)).decode("utf-8", errors="replace")
    assert TOKENIZER.decode(TOKENIZER.encode(data)) == data
    assert TOKENIZER.decode([299]) == "<299>"


@pytest.mark.parametrize("case", DSML, ids=[case.name for case in DSML])
def test_channels_do_not_depend_on_the_cut(case: Transcript) -> None:
    """Same channels, counts and finish for every grouping of tokens, with speculation or not."""
    tools = byte_deepseek(512)
    tokens = tools.tokenizer.encode(case.text, add_special=False)
    params = SamplingParams(max_tokens=10_000)

    def total(sizes: Sequence[int], stops: Sequence[str] = ()) -> tuple[object, ...]:
        prompt = Prompt([0], case.opening)
        stream = tools.answer_stream(stops, params, prompt, calls="read")
        found = run(stream, outputs(tokens, sizes, logprobs=False))
        return (
            "".join(delta.reasoning for delta in found),
            "".join(delta.text for delta in found),
            [(call.name, call.arguments) for delta in found for call in delta.calls],
            sum(len(delta.tokens) for delta in found),
            (stream.completion_tokens, stream.reasoning_tokens, stream.finish, stream.notes),
        )

    whole, stopped = total([]), total([], ["Plan", "o"])
    assert whole[3] == len(tokens)
    draw = random.Random(case.name)
    for _ in range(10):
        sizes = [draw.randint(0, 6) for _ in range(200)]
        assert total(sizes) == whole
        assert total(sizes, ["Plan", "o"]) == stopped


def test_the_stop_string_that_ended_the_text_is_known() -> None:
    text = byte_deepseek(512)
    params = SamplingParams(max_tokens=99)
    for said, stops, found in (
        ("one END two", ["two", "END"], "END"),
        ("one", ["END"], None),
        ("so</think>on", ["</think>"], "</think>"),  # as the client spelled it
    ):
        ids = text.tokenizer.encode(said, add_special=False)
        stream = text.answer_stream(stops, params, Prompt([], Opening.CONTENT), calls="text")
        run(stream, outputs(ids, [1] * len(ids), False))
        assert stream.stop_string == found
