"""Stop strings: the outcome does not depend on how the text arrives."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import RequestError
from metainfer.text.stops import MAX_STOP_CHARS, MAX_STOPS, StopMatcher

FEW = st.text(alphabet="ab\n", min_size=1, max_size=5)


def run(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop)
    out = ""
    for piece in pieces:
        emitted, stopped = matcher.push(piece)
        out += emitted
        assert stopped == (matcher.matched is not None)
    return out + matcher.flush(), matcher.matched


def reference(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The rule, by definition: grow the text one character at a time."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab\n", max_size=24),
    stops=st.lists(FEW, max_size=4),
    include_stop=st.booleans(),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
def test_any_split_gives_the_rule(
    text: str, stops: list[str], include_stop: bool, cuts: list[int]
) -> None:
    expected = reference(text, stops, include_stop)
    assert run([text], stops, include_stop) == expected
    assert run(list(text), stops, include_stop) == expected
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]], stops, include_stop) == expected
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in pairwise(borders)]
    assert run(parts, stops, include_stop) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab", max_size=20), stops=st.lists(FEW, min_size=1, max_size=3))
def test_no_more_is_held_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted, stopped = matcher.push(text)
    if not stopped:
        held = matcher.flush()
        assert emitted + held == text
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


def test_plain_cases() -> None:
    assert run(["Hello wor", "ld. E", "ND more"], ["END"]) == ("Hello world. ", "END")
    assert run(["Hello END"], ["END"], include_stop=True) == ("Hello END", "END")
    assert run(["EN"], ["END"]) == ("EN", None)
    assert run(["abab"], ["b", "abab"]) == ("a", "b")
    assert run(["xaby"], ["b", "ab"]) == ("x", "ab")
    assert run(["anything"], []) == ("anything", None)
    assert run(["日本語。"], ["。"]) == ("日本語", "。")


def test_nothing_after_a_stop() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_bounds_are_request_errors() -> None:
    StopMatcher(["a" * MAX_STOP_CHARS] * MAX_STOPS)
    for stops in ([""], ["a" * (MAX_STOP_CHARS + 1)], ["a"] * (MAX_STOPS + 1)):
        with pytest.raises(RequestError) as caught:
            StopMatcher(stops)
        assert caught.value.param == "stop" and caught.value.status == 400


def test_a_thousand_streams_with_long_stops_stay_small() -> None:
    """64 prompts with `n` 16 and every stop string at its limit: one body of 5 KB asks for it."""
    stops = [chr(97 + place) * MAX_STOP_CHARS for place in range(MAX_STOPS)]
    tracemalloc.start()
    try:
        streams = [StopMatcher(stops) for _ in range(1024)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(streams) == 1024
    assert peak < 4 << 20
