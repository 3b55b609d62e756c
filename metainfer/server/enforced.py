"""Calls that have to hold: the grammar of an answer that may, or must, call the offered tools.

It is made of the parts of an answer in the family's own form (`text.call_forms`): an answer of
calls alone; calls or the text that was asked for; or free text in which a call, once begun, is one
of those that were offered, valid under its schema where the tool says `strict`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from metainfer.core import parts
from metainfer.core.errors import RequestError
from metainfer.core.request import GrammarSpec
from metainfer.engine.model_text import TextTools
from metainfer.grammar.check_main import MARKS
from metainfer.grammar.rules import MAX_PARTS_CHARS, bad_grammar, json_spec
from metainfer.server.structured import Asked, check, marker_ids, placed
from metainfer.server.tool_choice import ToolChoice
from metainfer.text.call_forms import CallRule, form_of, only_calls, text_with_calls
from metainfer.text.dialogue import Prompt

NOT_ENFORCED = "strict_not_enforced"
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


async def call_grammar(
    text: TextTools,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    wish: Asked | None,
    prompt: Prompt,
    library: str,
) -> tuple[GrammarSpec | None, tuple[str, ...]]:
    """(the grammar of an answer to `prompt` that may call `tools`, None where nothing has to hold;
    remarks).

    `wish` is a grammar for the answer's text: one that may be followed instead. `library`: by whose
    word it can be enforced.

    Raises:
        RequestError: 400 ``invalid_schema``; what must hold cannot be enforced. Under ``auto`` that
            is a remark where all that was asked is a tool's ``strict``.
    """
    names = [tool["name"] for tool in tools] if choice.names is None else choice.names
    offered = [tool for tool in tools if tool["name"] in names]
    must = choice.mode == "required"
    strict = any(tool.get("strict") is True for tool in offered)
    if not (must or strict or wish is not None or choice.names is not None):
        return None, ()
    only_strict = not must and wish is None and choice.names is None
    try:
        spec = await _enforced(text, offered, choice, None if must else wish, library)
        return placed(spec, text, prompt, "tools"), ()
    except RequestError as error:
        if only_strict and error.status == 400:
            return None, (NOT_ENFORCED,)
        raise


async def _enforced(
    text: TextTools,
    offered: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    wish: Asked | None,
    library: str,
) -> GrammarSpec:
    """The checked grammar over the model's own markers."""
    every = choice.mode == "required"
    rules = [_rule(tool, every) for tool in offered]
    real = marker_ids(text)
    # Over bytes, where a grammar is tried out, markers are the ids behind the end.
    tried = {marker: MARKS + place for place, marker in enumerate(real)}

    def written(ids: Mapping[str, int], only: Sequence[CallRule]) -> GrammarSpec:
        return GrammarSpec("parts", parts.encode(_answer(text, ids, only, choice, wish)))

    spec = written(real, rules)
    if len(spec.text) > MAX_PARTS_CHARS:
        raise bad_grammar(
            f"tools become a grammar of {len(spec.text)} characters, at most {MAX_PARTS_CHARS} "
            "may be.",
            "tools",
            "Offer fewer or smaller tools.",
        )
    try:
        await check(("tools", written(tried, rules)), library)
    except RequestError as error:
        if error.code != "invalid_schema" or len(rules) == 1:
            raise
        for rule in rules:  # whose fault it is
            await check((f"the schema of {rule.name!r}", written(tried, [rule])), library)
        raise
    return spec


def _rule(tool: Mapping[str, Any], every: bool) -> CallRule:
    """What a call of `tool` has to be: its schema counts if all do, or if it is strict."""
    if not (every or tool.get("strict") is True):
        return CallRule(tool["name"])
    schema = tool.get("parameters")
    if schema is None:
        return CallRule(tool["name"], _NO_ARGUMENTS)
    json_spec(schema, f"the schema of {tool['name']!r}")  # its bounds
    return CallRule(tool["name"], schema)


def _answer(
    text: TextTools,
    ids: Mapping[str, int],
    rules: Sequence[CallRule],
    choice: ToolChoice,
    wish: Asked | None,
) -> parts.Part:
    tags = text.format.markup.calls
    assert tags is not None  # tools are offered
    form, most = form_of(tags, ids), 1 if choice.one else None
    if choice.mode == "required":
        return only_calls(form, rules, most)
    if wish is not None:
        return parts.AnyOf((_wished(wish[1]), only_calls(form, rules, most)))
    return text_with_calls(form, rules, most)


def _wished(spec: GrammarSpec) -> parts.Part:
    if spec.kind == "json":
        return parts.Json(json.loads(spec.text))
    if spec.kind == "regex":
        return parts.Pattern(spec.text)
    return parts.AnyOf(tuple(map(parts.Literal, json.loads(spec.text))))
