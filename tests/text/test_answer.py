"""Reasoning and calls out of a stream: field cases B-31 to B-34."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts import ALL, C, D, E, R, Transcript, block, invoke, tool_call

from metainfer.text.answer import MAX_GAP, AnswerParser, Run
from metainfer.text.calls import MAX_CALL_CHARS, Call
from metainfer.text.markup import (
    DEEPSEEK,
    HERMES,
    PLAIN,
    QWEN3,
    THINK,
    Markup,
    Opening,
    markup_of_template,
)
from metainfer.text.scan import clean, substitute, symbol

Parsed = tuple[str, str, list[tuple[str, str]], tuple[str, ...]]
IDS = [case.name for case in ALL]
MARKERS = (D, "<think>", "</think>", "<tool_call>", "</tool_call>")


def parse(
    markup: Markup,
    opening: Opening,
    pieces: Iterable[str],
    *,
    cut: bool = False,
    calls: str = "read",
    symbols: dict[str, str] | None = None,
) -> Parsed:
    parser = AnswerParser(markup, opening, calls=calls, symbols=symbols)
    answers = [*map(parser.push, pieces), parser.finish(cut=cut)]
    return (
        "".join(answer.reasoning for answer in answers),
        "".join(answer.content for answer in answers),
        [(call.name, call.arguments) for answer in answers for call in answer.calls],
        tuple(parser.notes),
    )


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def whole(case: Transcript) -> Parsed:
    return parse(case.markup, case.opening, [case.text])


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_meaning(case: Transcript) -> None:
    reasoning, content, calls, notes = whole(case)
    assert (reasoning, content) == (case.reasoning, case.content)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == case.calls
    assert notes == case.notes


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_b31_b33_every_split_gives_the_same(case: Transcript) -> None:
    expected = whole(case)
    assert parse(case.markup, case.opening, list(case.text)) == expected
    for cut in range(len(case.text) + 1):
        halves = [case.text[:cut], case.text[cut:]]
        assert parse(case.markup, case.opening, halves) == expected, cut
    draw = random.Random(case.name)
    for _ in range(30):
        cuts, at = [], 0
        while at < len(case.text):
            at += draw.randint(1, 12)
            cuts.append(min(at, len(case.text)))
        assert parse(case.markup, case.opening, pieces_of(case.text, cuts)) == expected


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_marker_tokens_mean_what_marker_texts_mean(case: Transcript) -> None:
    """With a tokenizer that has the markers, the parse is that of the spelled ones."""
    symbols = {marker: symbol(i) for i, marker in enumerate(case.markup.markers)}
    text = substitute(case.text, symbols)
    assert parse(case.markup, case.opening, [text], symbols=symbols) == whole(case)
    assert parse(case.markup, case.opening, list(text), symbols=symbols) == whole(case)


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_b31_nothing_leaks_at_any_truncation(case: Transcript) -> None:
    """Cut at every length: no marker in text, whole calls only, each of them a real one."""
    real = [(name, json.loads(arguments)) for name, arguments in whole(case)[2]]
    symbols = {marker: symbol(i) for i, marker in enumerate(case.markup.markers)}
    tokens = substitute(case.text, symbols)
    for size in range(len(tokens) + 1):
        reasoning, content, calls, _ = parse(
            case.markup, case.opening, [tokens[:size]], cut=True, symbols=symbols
        )
        for marker in (*MARKERS, *symbols.values()):
            assert marker not in reasoning + content, (size, marker)
        found = [(name, json.loads(arguments)) for name, arguments in calls]
        if case.name != "quote never closed, then text":
            assert found == real[: len(found)], size


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_b31_what_is_held_back_is_bounded(case: Transcript) -> None:
    """Text that is no marker is out after at most a marker's length and the gap."""
    if case.name in ("closing tag missing at the end", "quote never closed, then text"):
        case = Transcript("", case.markup, case.opening, "")
    parser = AnswerParser(case.markup, case.opening)
    parser.push(case.text)
    bound = max(map(len, MARKERS)) + 2 + MAX_GAP
    given = taken = 0
    for char in "lorem ipsum < dolor\n " * 3:
        answer = parser.push(char)
        given += 1
        taken += len(answer.reasoning + answer.content)
        assert given - taken <= bound
    answer = parser.finish()
    assert taken + len(answer.reasoning + answer.content) >= given - 1


WORDS = st.text(alphabet=st.sampled_from('ab <>/\n"{}\\｜名'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=5,
)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=3)


@given(
    st.sampled_from([(DEEPSEEK, ""), (DEEPSEEK, " "), (QWEN3, "")]),
    WORDS, WORDS, st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3), st.randoms(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_what_was_written_is_read_back(form, reasoning, content, calls, draw) -> None:
    markup, space = form
    if markup is DEEPSEEK:
        tail = (
            block(*(invoke(n, a, space) for n, a in calls), name=space + "calls") if calls else ""
        )
    else:
        tail = "".join("\n" + tool_call(name, arguments) for name, arguments in calls)
    text = f"{reasoning}</think>{content}{tail}"
    cuts = sorted(draw.randint(0, len(text)) for _ in range(6))
    got = parse(markup, R, pieces_of(text, cuts))
    assert got[0] == framed(reasoning)
    assert got[1] == (framed(content) if calls else framed(content, end=False))
    assert [(name, json.loads(arguments)) for name, arguments in got[2]] == calls
    assert got[3] == ()


def framed(text: str, end: bool = True) -> str:
    text = text.lstrip("\n")
    if not end:
        return text
    body = text.rstrip("\n")
    return body + text[len(body) :][: max(0, len(text) - len(body) - MAX_GAP)]


SOUP = st.lists(st.sampled_from(
    ["<think>", "</think>", f"<{D}tool_calls>", f'<{D}invoke name="f">', f"</{D}invoke>",
     f'<{D}parameter name="a" string="true">', f"</{D}parameter>", f"</{D}tool_calls>", f"<{D}",
     "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', '{"a', "x", "\n", "\n\n",
     " ", "<", "</", ">", '"', "\\", "}"]), max_size=14)  # fmt: skip


@given(SOUP,
    st.sampled_from([DEEPSEEK, QWEN3, HERMES, THINK]), st.sampled_from([R, C, E]), st.booleans(),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_soup_is_parsed_alike_for_every_split(soup, markup, opening, cut) -> None:
    text = "".join(soup)
    expected = parse(markup, opening, [text], cut=cut)
    assert parse(markup, opening, soup, cut=cut) == expected
    assert parse(markup, opening, list(text), cut=cut) == expected
    for _, arguments in expected[2]:
        assert isinstance(json.loads(arguments), dict)
    symbols = {marker: symbol(i) for i, marker in enumerate(markup.markers)}
    tokens = substitute(text, symbols)
    got = parse(markup, opening, list(tokens), cut=cut, symbols=symbols)
    assert not any(marker in got[0] + got[1] for marker in markup.markers)


def order(markup: Markup, opening: Opening, pieces: Iterable[str], *, cut: bool) -> list[list[str]]:
    """What was written in which order; neighbouring runs of a channel are one."""
    parser = AnswerParser(markup, opening)
    found: list[list[str]] = []
    for answer in (*map(parser.push, pieces), parser.finish(cut=cut)):
        for piece in answer.pieces:
            if isinstance(piece, Call):
                found.append(["call", piece.name, piece.arguments])
            elif found and found[-1][0] == piece.channel:
                found[-1][1] += piece.text
            else:
                found.append([piece.channel, piece.text])
    return found


@given(SOUP, st.sampled_from([DEEPSEEK, QWEN3]), st.sampled_from([R, C, E]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_order_of_pieces_is_the_same_for_every_split(soup, markup, opening, cut) -> None:
    expected = order(markup, opening, ["".join(soup)], cut=cut)
    assert order(markup, opening, soup, cut=cut) == expected
    assert order(markup, opening, list("".join(soup)), cut=cut) == expected


def test_text_between_calls_keeps_its_place() -> None:
    text = f"a{tool_call('f', {})}b{tool_call('g', {})}c<think>d</think>e"
    assert [piece[:2] for piece in order(QWEN3, C, [text], cut=False)] == [
        ["content", "a"], ["call", "f"], ["content", "b"], ["call", "g"], ["content", "c"],
        ["reasoning", "d"], ["content", "e"],
    ]  # fmt: skip


def test_b32_reasoning_that_is_never_closed_is_kept_and_said() -> None:
    assert parse(DEEPSEEK, R, ["thinking on"]) == ("thinking on", "", [], ("reasoning_not_closed",))
    # Cut by a limit, that is no surprise; the finish reason says it.
    assert parse(DEEPSEEK, R, ["thinking on"], cut=True) == ("thinking on", "", [], ())


def test_b32_a_spelled_tag_in_a_code_block_closes_nothing_where_tokens_tell() -> None:
    symbols = {marker: symbol(i) for i, marker in enumerate(DEEPSEEK.markers)}
    text = "Write:\n```\n</think>\n```\nso." + symbols["</think>"] + "Done."
    reasoning, content, _, notes = parse(DEEPSEEK, R, list(text), symbols=symbols)
    assert (reasoning, content, notes) == ("Write:\n```\n</think>\n```\nso.", "Done.", ())
    spelled = parse(DEEPSEEK, R, ["a\n```\n</think>\n```"])
    assert spelled[:2] == ("a\n```", "```")  # without tokens the first closing tag closes


def test_b34_names_are_whole_and_come_once() -> None:
    parser = AnswerParser(QWEN3, C)
    seen = []
    for char in tool_call("get_weather", {"city": "Łódź"}) + "\n" + tool_call("get_time", {}):
        seen += parser.push(char).calls
    assert [call.name for call in seen] == ["get_weather", "get_time"]


def test_without_tools_nothing_is_taken_for_a_call() -> None:
    text = "The form is <tool_call>{}</tool_call>."
    assert parse(HERMES, C, [text], calls="text")[1] == text
    symbols = {marker: symbol(i) for i, marker in enumerate(HERMES.markers)}
    tokens = substitute(text, symbols)
    assert parse(HERMES, C, [tokens], calls="text", symbols=symbols)[1] == text


def test_calls_that_were_not_offered_are_cut_out_and_said() -> None:
    text = "No." + block(invoke("f", {})) + "\nSo."
    assert parse(DEEPSEEK, C, [text], calls="drop") == ("", "No.\nSo.", [], ("call_not_offered",))


def test_a_family_without_reasoning_has_no_such_tags() -> None:
    assert parse(PLAIN, R, ["a<think>b"]) == ("", "a<think>b", [], ())


def test_a_continued_answer_keeps_its_first_newlines() -> None:
    parser = AnswerParser(DEEPSEEK, C, continued=True)
    assert parser.push("\n\nmore").content == "\n\nmore"


@pytest.mark.parametrize("start", [f'<{D}invoke name="f">\n<{D}parameter name="a" string="true">',
                                   '<tool_call>{"a": "', "<tool_call>x"])  # fmt: skip
def test_a_call_without_end_is_given_up(start: str) -> None:
    markup = DEEPSEEK if D in start else HERMES
    parser = AnswerParser(markup, C)
    parser.push(start)
    for _ in range(MAX_CALL_CHARS // 1000 + 2):
        parser.push("y" * 1000)
    assert "call_too_long" in parser.notes
    assert parser.push("z").content == "z"


def test_many_calls_in_one_push_do_not_nest() -> None:
    text = '<tool_call>{"name": "f"}' * 3000
    assert len(parse(HERMES, C, [text])[2]) == 3000
    assert len(parse(DEEPSEEK, C, [invoke("f", {}) * 3000])[2]) == 3000


def test_a_marker_half_written_at_a_limit_is_no_text() -> None:
    for half in ("</thi", f"<{D[:3]}", "\n\n</think"):
        assert parse(DEEPSEEK, R, ["so" + half], cut=True)[0] == "so" + half[: half.index("<")]
        assert parse(DEEPSEEK, R, ["so" + half])[0] == "so" + half
    assert parse(DEEPSEEK, R, ["a <"], cut=True)[0] == "a <"  # may as well be text


def test_a_run_of_newlines_is_held_back_to_a_bound() -> None:
    parser = AnswerParser(DEEPSEEK, C)
    assert parser.push("a" + "\n" * 50).content == "a" + "\n" * (50 - MAX_GAP)
    assert parser.push("b").content == "\n" * MAX_GAP + "b"


def test_symbols_in_ordinary_text_are_no_markers() -> None:
    assert clean(f"a{symbol(0)}b{symbol(31)}") == "a\ufffdb\ufffd"
    with pytest.raises(ValueError, match="32"):
        symbol(32)


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (None, PLAIN),
        ("{{ messages }}", PLAIN),
        ("<tool_call> </tool_call>", HERMES),
        ("<tool_call> </tool_call> <think> </think>", QWEN3),
        ("<think> </think>", THINK),
        ("<tool_call><function= </tool_call>", PLAIN),
        ("<tool_call><arg_key> </tool_call> <think></think>", THINK),
    ],
)
def test_rows_are_found_by_what_the_template_writes(template: str | None, row: Markup) -> None:
    assert markup_of_template(template) is row


@pytest.mark.parametrize("markup", [QWEN3, DEEPSEEK], ids=["json", "dsml"])
def test_arguments_that_python_cannot_write_again_are_handed_out_as_written(
    markup: Markup,
) -> None:
    """Half a surrogate pair ended in a 500, a number beyond floats in `Infinity`."""
    for inner in (r'{"a": "\ud800"}', '{"a": [1e999]}'):
        if markup is QWEN3:
            text = f'<tool_call>{{"name": "f", "arguments": {inner}}}</tool_call>'
        else:
            text = f'<{D}tool_calls><{D}invoke name="f">{inner}</{D}invoke></{D}tool_calls>'
        parser = AnswerParser(markup, Opening.CONTENT)
        (call,) = [*parser.push(text).calls, *parser.finish().calls]
        assert call.arguments == inner
        call.arguments.encode()


def test_enforced_calls_are_read_behind_reasoning_only() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": {"b": 1, "b": 2}}}</tool_call>'
    parser = AnswerParser(QWEN3, Opening.EITHER, calls="enforced")
    pieces = [*parser.push(f"<think>{call}</think>{call}").pieces, *parser.finish().pieces]
    assert pieces == [Run("reasoning", call), Call("f", '{"a": {"b": 2}}')]
    assert parser.notes == ["duplicate_parameter"]
    again = AnswerParser(QWEN3, Opening.EITHER)
    assert not again.push(call).calls and again.notes == ["malformed_call"]


@pytest.mark.parametrize("kept", range(1, 75))
def test_b31_a_block_that_is_cut_leaves_no_markup(kept: int) -> None:
    whole = f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n</{D}invoke>\n</{D}tool_calls>'
    parser = AnswerParser(DEEPSEEK, Opening.CONTENT, calls="enforced")
    answers = [parser.push(whole[:kept]), parser.finish(cut=True)]
    calls = [call for answer in answers for call in answer.calls]
    assert "".join(answer.content for answer in answers).strip("\n") in ("", "<", "<｜")
    inside = whole.index(">") < kept  # behind the block's own tag
    assert bool(calls) or not inside or "call_not_finished" in parser.notes
