"""Prompts over chat templates: schemas as sent, openings, switches, answers that go on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import RequestError
from metainfer.text.byte_text import byte_tokenizer
from metainfer.text.chat import ChatTemplate
from metainfer.text.dialogue import Conversation, JinjaFormat, ToolUse, Turn
from metainfer.text.markup import Opening

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
TOKENIZER = byte_tokenizer(512, MARKS)
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinking is defined and thinking %}<think>\n"
    "{% elif thinking is defined %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
FORM = JinjaFormat(TOKENIZER, ChatTemplate(TEMPLATE))
ASKED = (Turn("user", ("hi",)),)


def shown(form: JinjaFormat, conversation: Conversation) -> str:
    return TOKENIZER.decode(form.encode(conversation).ids, skip_special=False)


NAMES = st.from_regex(r"[a-z]{1,4}", fullmatch=True)
SCHEMAS = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("é<&\"'"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
FUNCTIONS = st.dictionaries(
    st.sampled_from(["name", "description", "parameters", "strict", "x-own"]), SCHEMAS, max_size=5
)


@given(st.lists(FUNCTIONS, min_size=1, max_size=3))
@settings(max_examples=80, deadline=None)
def test_b35_schemas_are_rendered_as_sent(functions: list[dict[str, Any]]) -> None:
    """Byte for byte what the template's publisher gets from transformers: keys, order, numbers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = Conversation(turns=ASKED, tools=tuple(functions))
    tools = [{"type": "function", "function": function} for function in functions]
    rendered, _ = render_jinja_template(
        conversations=[[{"role": "user", "content": "hi"}]],
        chat_template=TEMPLATE,
        tools=tools,
        add_generation_prompt=True,
    )
    assert shown(FORM, conversation) == rendered[0]
    line = shown(FORM, conversation).split("\n")[0]
    assert json.dumps(functions[0], ensure_ascii=False) in line


def test_calls_reach_the_template_as_objects() -> None:
    calls = (ToolUse("1", "f", '{"b": 1, "a": "é"}'), ToolUse("2", "g", "not json"))
    turns = (*ASKED, Turn("assistant", ("",), calls=calls), Turn("tool", ("r",), call_id="1"))
    text = shown(FORM, Conversation(turns=turns))
    assert '"arguments": {"b": 1, "a": "é"}' in text and '"arguments": "not json"' in text
    assert "<|im_start|>tool\nr<|im_end|>" in text


@pytest.mark.parametrize(
    ("thinking", "opening"),
    [(None, Opening.EITHER), (True, Opening.REASONING), (False, Opening.CONTENT)],
)
def test_the_prompts_end_says_where_the_answer_begins(thinking: Any, opening: Opening) -> None:
    assert FORM.encode(Conversation(turns=ASKED, thinking=thinking)).opening is opening


def test_switches_are_named_as_the_template_names_them() -> None:
    none = FORM.encode(Conversation(turns=ASKED, effort="none"))
    assert none == FORM.encode(Conversation(turns=ASKED, thinking=False))
    with pytest.raises(RequestError, match="knows no reasoning_effort 'high'"):
        FORM.encode(Conversation(turns=ASKED, effort="high"))
    graded = JinjaFormat(TOKENIZER, ChatTemplate("{{ reasoning_effort }}"))
    assert shown(graded, Conversation(turns=ASKED, effort="high")) == "high"
    other = JinjaFormat(TOKENIZER, ChatTemplate("{{ enable_thinking }}{{ thinking is defined }}"))
    assert shown(other, Conversation(turns=ASKED, thinking=False)) == "FalseTrue"
    only = JinjaFormat(TOKENIZER, ChatTemplate("{{ enable_thinking }}"))
    assert shown(only, Conversation(turns=ASKED, thinking=True)) == "True"
    given_too = Conversation(turns=ASKED, thinking=True, variables={"enable_thinking": 3})
    assert shown(only, given_too) == "3"


def test_an_answer_goes_on_where_it_was_left() -> None:
    def on(text: str) -> str:
        turns = (Turn("user", ("So",)), Turn("assistant", (text,)))
        prompt = FORM.encode(Conversation(turns=turns, continue_last=True))
        assert (prompt.opening, prompt.continued) == (Opening.CONTENT, True)
        return TOKENIZER.decode(prompt.ids, skip_special=False)

    head = "<|im_start|>user\nSo<|im_end|>\n<|im_start|>assistant\n"
    assert on("So it") == f"{head}So it"
    assert on("So") == f"{head}So"  # not the user's
    assert on("i") == f"{head}i"  # not a letter of the closing tag
    assert on(" it \n") == f"{head}it \n"  # the template strips its head only
    assert on("") == head
    silent = JinjaFormat(TOKENIZER, ChatTemplate("{{ messages[0].content }}"))
    with pytest.raises(RequestError, match="does not show the last message"):
        silent.encode(Conversation(turns=(*ASKED, *ASKED), continue_last=True))
