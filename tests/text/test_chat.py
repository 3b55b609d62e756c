"""Chat templates: rendered as `transformers` does; what goes wrong is the request's error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from metainfer.core.errors import ModelError, RequestError
from metainfer.text.chat import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Wetter <b>jetzt</b> & "später" 天气',
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"unit": {"enum": ["C", "F"]}, "city": {"type": "string"}},
        },
    },
}
BARE_TOOL = {"function": {"name": "now"}, "type": "function"}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüß Gott 😀"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {"a": [1]}}}],
    },
    {"role": "tool", "content": '{"t": "12:00"}', "tool_call_id": "x"},
]

# Made for these tests; each leans on a different part of the conventions.
TEMPLATES = {
    "chatml": (
        "{%- for m in messages %}\n"
        "    {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>' }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n"
    ),
    "tools": (
        "{{ bos_token }}\n"
        "{% if tools %}\n"
        "  {% for t in tools %}\n{{ t | tojson }}\n{{ t.function | tojson(indent=2) }}\n"
        "  {% endfor %}\n"
        "{% endif %}\n"
        "{% for m in messages %}{% if 'content' not in m %}{% continue %}{% endif %}"
        "[{{ m['role'] }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    ),
    "calls": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% generation %}{{ m.role }}"
        "{% endgeneration %}{% for c in m.tool_calls or [] %}{% set ns.n = ns.n + 1 %}"
        "{{ c.function.name }}({{ c.function.arguments | tojson(sort_keys=true) }})"
        "{% endfor %}{% endfor %}{{ ns.n }}{% if unset_thing is defined %}!{% endif %}"
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    ),
    "strings": (
        "{{ messages[0].content.split(' ')[-1] }}|{{ messages | length }}|"
        "{{ '\\n' in messages[0].content }}|{{ messages[-1].role.upper() }}|"
        "{{ messages | map(attribute='role') | join(',') }}|{{ messages[:-1] | length }}|"
        "{{ extra | default('none') }}|{{ 7 // 2 }}|{{ 'a' * 3 }}|{{ 2 ** 5 }}|{{ nothing }}"
    ),
}


def theirs(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """`transformers`' rendering of one conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    cleaned = [{k: v for k, v in m.items() if v is not None} for m in messages]
    rendered, _ = render_jinja_template(
        conversations=[cleaned], chat_template=template, **SPECIAL, **kwargs
    )
    return str(rendered[0])


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL, BARE_TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(name: str, tools: list[Any] | None, generate: bool) -> None:
    template = TEMPLATES[name]
    for messages in (TALK, TALK[:2], TALK[1:2]):
        ours = ChatTemplate(template, SPECIAL).render(
            messages, tools=tools, add_generation_prompt=generate, extra="x"
        )
        assert ours == theirs(
            template, messages, tools=tools, add_generation_prompt=generate, extra="x"
        )


def test_the_catalogues_template(smollm2_metadata: Mapping[str, Any]) -> None:
    template = ChatTemplate.from_gguf_metadata(smollm2_metadata)
    source = smollm2_metadata["tokenizer.chat_template"]
    for messages in (TALK[:2], TALK[1:2]):
        assert template.render(messages) == theirs(source, messages, add_generation_prompt=True)
    assert template.render([{"role": "user", "content": "Hi"}]).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_b35_schemas_are_rendered_as_sent() -> None:
    """Nothing is added to a tool's schema, and keys keep the order in which they were sent."""
    source = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    schemas: list[dict[str, Any]] = [TOOL, BARE_TOOL]
    schemas += [json.loads(json.dumps(TOOL["function"])), {"z": 1, "a": {"y": None, "b": []}}]
    rendered = ChatTemplate(source).render([], tools=schemas)
    assert rendered.splitlines() == [json.dumps(s, ensure_ascii=False) for s in schemas]
    assert rendered == theirs(source, [{"role": "user", "content": ""}], tools=schemas)
    assert "<b>jetzt</b> & " in rendered and "天气" in rendered


def test_template_errors_are_request_errors() -> None:
    cases = {
        "{{ raise_exception('Roles must alternate') }}": "Roles must alternate",
        "{{ messages[5].role }}": "no element 5|undefined",
        "{{ nothing.at.all }}": "undefined",
        "{{ 1 / 0 }}": "division",
        "{{ messages + 1 }}": "concatenate",
        "{{ nothing | tojson }}": "Undefined",
        "{{ 'a' | int + messages }}": "unsupported operand",
        "{{ messages.__class__.__mro__ }}": "unsafe|undefined",
        "{{ messages.append(1) }}": "unsafe|not safely",
        "{{ 'x' * 100000000 }}": "multiplies",
        "{{ 10 ** 100000 }}": "power",
        "{% for i in range(99999999) %}{% endfor %}": "Range",
        "{% include 'x' %}": "loader|no loader",
        "{% set n = namespace() %}{% set n._x = 1 %}": "underscore",
        "{{ namespace(_x=1) }}": "underscore",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    }
    for source, words in cases.items():
        with pytest.raises(RequestError, match=words) as caught:
            ChatTemplate(source).render(TALK)
        assert caught.value.status == 400 and caught.value.param == "messages"
        assert caught.value.code == "chat_template_error"


def test_endless_templates_are_stopped() -> None:
    nested = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="too long"):
        ChatTemplate(nested, max_seconds=0.2).render(TALK)
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}xy{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="exceeds 1000 characters"):
        ChatTemplate(endless, max_chars=1000).render(TALK)


def test_bad_syntax_is_a_model_error() -> None:
    for source in ("{% if %}", "{{ a", "{% nope %}", "{% generation %}x", "{{ x | nofilter }}"):
        with pytest.raises(ModelError, match="not valid Jinja, line 1") as caught:
            ChatTemplate(source)
        assert "--chat-template" in caught.value.remedy
    with pytest.raises(ModelError, match="deeply nested"):
        ChatTemplate("{{ " + "(" * 30_000 + ")" * 30_000 + " }}")


def test_without_a_template_the_remedy_is_named() -> None:
    with pytest.raises(RequestError, match="no chat template") as caught:
        ChatTemplate(None).render(TALK)
    assert caught.value.code == "no_chat_template"
    assert "/v1/completions" in caught.value.remedy and "--chat-template" in caught.value.remedy


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_text_parts_are_joined_for_templates_that_want_text() -> None:
    talk = [{"role": "user", "content": PARTS}, {"role": "user", "content": "three"}]
    plain = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert not plain.takes_parts and plain.render(talk) == "[one\ntwo][three]"
    adding = ChatTemplate("{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}")
    assert not adding.takes_parts and adding.render(talk) == "<one\ntwo><three>"
    dumping = ChatTemplate("{% for m in messages %}{{ m.content | tojson }}{% endfor %}")
    assert not dumping.takes_parts and dumping.render(talk[:1]) == '"one\\ntwo"'
    own = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(own).takes_parts
    assert ChatTemplate(own).render(talk) == theirs(own, talk) == "(one)(two)three"


@pytest.mark.parametrize("part", [{"type": "image_url"}, {"type": "text"}, "x", None])
def test_parts_that_are_no_text_are_refused(part: Any) -> None:
    with pytest.raises(RequestError, match="not text") as caught:
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": [part]}])
    assert caught.value.param == "messages" and caught.value.code == "unsupported_content"


def test_arguments_are_checked() -> None:
    template = ChatTemplate("x")
    with pytest.raises(RequestError, match="'documents' is reserved"):
        template.render(TALK, documents=[])
    with pytest.raises(RequestError, match="at most 4096"):
        template.render([{"role": "user", "content": ""}] * 4097)


def test_the_callers_messages_are_not_touched() -> None:
    before = json.dumps(TALK)
    ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").render(TALK)
    assert json.dumps(TALK) == before


def test_the_clock_is_the_callers() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(source, now=lambda: datetime(2026, 2, 3)).render([]) == "03 Feb 2026"
    assert ChatTemplate(source).render([]) == datetime.now().strftime("%d %b %Y")


def test_templates_of_a_folder(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path).names == ()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one {{ bos_token }}"}))
    assert ChatTemplate.from_folder(tmp_path, SPECIAL).render([]) == "one <s>"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template.render([]) == template.render([], tools=[]) == "two"
    assert template.render([], tools=[TOOL]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("three")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("extra")
    template = ChatTemplate.from_folder(tmp_path)
    assert (template.render([]), template.render([], tools=[TOOL])) == ("three", "extra")
    assert ChatTemplate.from_file(tmp_path / "chat_template.jinja").source() == "three"


@pytest.mark.parametrize("value", [1, {"a": 1}, [1], [{"name": "x"}], [{"template": "x"}]])
def test_odd_templates_of_a_folder_are_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelError, match="neither text nor a list"):
        ChatTemplate.from_folder(tmp_path)


def test_unreadable_template_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.from_file(tmp_path / "absent.jinja")
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.from_file(tmp_path / "bad.jinja")


def test_named_templates_of_gguf_metadata() -> None:
    metadata = {
        "tokenizer.chat_template": "main",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
        "general.name": "x",
    }
    template = ChatTemplate.from_gguf_metadata(metadata)
    assert template.names == ("default", "tool_use")
    assert template.render([], tools=[TOOL]) == "tools"
