"""What a request may say and what comes of it: `docs/api.md`, from the types and tables.

    python -m metainfer.server.surface > docs/api.md

A test compares the file with this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from metainfer.server.access import LEVELS
from metainfer.server.bounds import BOUNDS, Bounds
from metainfer.server.dialects import messages_body, responses_body
from metainfer.server.dialects.messages_body import MessagesRequest
from metainfer.server.dialects.responses_body import ResponsesRequest
from metainfer.server.openapi import REASONS
from metainfer.server.schemas import (
    IGNORED,
    INSTEAD,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
)

_HEAD = """\
# HTTP API

Made from the code by `python -m metainfer.server.surface`. The running server's own document,
with its model names and limits, is `/openapi.json`. Choices behind these tables are explained in
[`metainfer/server/README.md`](../metainfer/server/README.md).

A field that is on no table is a 400 `unknown_parameter` with a suggestion: a typo must not look
like a setting that took effect.

| header | what it does |
|---|---|
| `Authorization: Bearer KEY` | API key, or the admin key |
| `X-Request-Id` | up to 128 visible characters; sent back, else one is made |
| `X-Request-Timeout` | seconds after which it ends: 504 `deadline_exceeded`, or an error event |
| `Content-Type: application/json` | needed on every body |
"""

_DIALECTS = (
    ("/v1/responses", ResponsesRequest, responses_body.RULES),
    ("/v1/messages", MessagesRequest, messages_body.RULES),
)
_TYPES = (("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest))


def text() -> str:
    """The whole page."""
    refused = _refused(UNSUPPORTED, IGNORED)
    parts = [_HEAD, *_routes(), *_honoured(), "## Fields that are refused\n", *refused]
    parts += [*_dialects(), *_limits(), *_statuses()]
    return "\n".join(parts)


def _routes() -> Iterator[str]:
    yield "## Routes\n"
    yield "`public`: anyone. `user`: an API key, where one is set. `admin`: the admin key; without"
    yield "one configured nobody.\n"
    yield "| path | level |"
    yield "|---|---|"
    for path, level in LEVELS.items():
        if not path.startswith("/page/"):
            yield f"| `{path}` | {level.value} |"
    yield ""


def _honoured() -> Iterator[str]:
    yield "## Fields that are honoured\n"
    yield "| field | chat | completions | values |"
    yield "|---|---|---|---|"
    described = [_properties(kind) for _, kind in _TYPES]
    for name in dict.fromkeys(name for properties in described for name in properties):
        marks = ["yes" if name in properties else "no" for properties in described]
        values = dict.fromkeys(_values(found[name]) for found in described if name in found)
        yield f"| `{name}` | {' | '.join(marks)} | {'; for completions '.join(values)} |"
    yield ""


def _properties(kind: type[msgspec.Struct]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components((kind,), ref_template="{name}")
    properties: dict[str, Any] = schemas[kind.__name__]["properties"]
    Bounds().narrow(properties)
    return properties


_SIZES = (
    ("minimum", ">= {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "<= {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {}"),
    ("maxItems", "at most {}"),
    ("maxProperties", "at most {}"),
)


def _values(described: Mapping[str, Any]) -> str:
    options = described.get("anyOf", [described])
    return " or ".join(filter(None, map(_one, options)))


def _one(option: Mapping[str, Any]) -> str:
    if "$ref" in option:
        return f"object `{option['$ref']}`"
    if "enum" in option:
        return ", ".join(f"`{value}`" for value in option["enum"] if value is not None)
    kind = option.get("type")
    if kind == "null":
        return ""
    sizes = [said.format(option[key]) for key, said in _SIZES if key in option]
    items = f" of ({_values(option['items'])})" if option.get("items") else ""
    return f"{kind or 'any'}{items}{' ' if sizes else ''}{', '.join(sizes)}"


def _refused(
    unsupported: Mapping[str, tuple[object, ...]], ignored: Sequence[str]
) -> Iterator[str]:
    yield "Accepted at the values that ask for nothing, else a 400 `unsupported_parameter`.\n"
    yield "| field | accepted at | instead |"
    yield "|---|---|---|"
    for name, values in sorted(unsupported.items()):
        shown = ", ".join(f"`{json.dumps(value)}`" for value in values)
        yield f"| `{name}` | {shown} | {INSTEAD.get(name, '')} |"
    listed = ", ".join(f"`{name}`" for name in sorted(ignored))
    yield f"\nHints that change no answer and are taken in silence: {listed}.\n"


def _dialects() -> Iterator[str]:
    for path, kind, rules in _DIALECTS:
        yield f"## Fields of `{path}`\n"
        yield "| field | values |"
        yield "|---|---|"
        for name, described in _properties(kind).items():
            yield f"| `{name}` | {_values(described)} |"
        yield ""
        yield from _refused(rules.unsupported, rules.ignored)


def _limits() -> Iterator[str]:
    yield "## Limits\n"
    yield "Set with `--limit NAME=N`; besides `--max-body` (4 MiB), `--max-headers` (256; 64 KiB"
    yield "in all), `--max-pending` (1024 generations, queued or running, beyond it 429),"
    yield "`--body-timeout` (60 s)."
    yield ""
    yield "| name | default | may be up to | of | field |"
    yield "|---|---|---|---|---|"
    for bound in BOUNDS:
        cells = (f"`{bound.name}`", f"{bound.default:,}", f"{bound.ceiling:,}", bound.text)
        yield f"| {' | '.join(cells)} | `{bound.field}` |"
    yield ""


def _statuses() -> Iterator[str]:
    yield "## Statuses\n"
    yield 'Every error is `{"error": {"message", "type", "param", "code"}}` (Anthropic\'s form on'
    yield "`/v1/messages`). In a stream it is an event, and no `[DONE]` follows.\n"
    yield "| status | why |"
    yield "|---|---|"
    for status, why in sorted(REASONS.items()):
        yield f"| {status} | {why} |"
    yield ""


if __name__ == "__main__":
    print(text(), end="")
