"""Structured output: from a body's fields to one grammar that the engine can take.

Four spellings ask for the same: OpenAI's `response_format`, vLLM's `structured_outputs` and its
older ``guided_*`` fields. A grammar is compiled once, over bytes, in a process of its own
(`checker`): what the library refuses is a 400 with its cause, and the engine never sees it.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import msgspec

from metainfer.core.errors import RequestError
from metainfer.core.request import GrammarSpec
from metainfer.engine.model_text import TextTools
from metainfer.grammar.backend import GrammarError
from metainfer.grammar.backends import KNOWN, require
from metainfer.grammar.rules import (
    ANY_OBJECT,
    MAX_SCHEMA_CHARS,
    bad_grammar,
    choice_spec,
    json_spec,
    regex_spec,
)
from metainfer.server.checker import Checker
from metainfer.server.schemas import ResponseFormat, Sampling, StructuredOutputs
from metainfer.text.dialogue import Prompt
from metainfer.text.markup import Opening

REMEMBERED = 256


Asked = tuple[str, GrammarSpec]


def grammar_of(body: Sampling) -> Asked | None:
    """The field by which `body` asks for a grammar, and the grammar: in bounds, not yet compiled.

    Raises:
        RequestError: 400; two fields ask, a schema is no schema, something is too large or deep.
    """
    found = [*_of_format(body.response_format), *_of_outputs(body.structured_outputs)]
    found += _of_fields("guided_", body.guided_json, body.guided_regex, body.guided_choice)
    if len(found) > 1:
        raise RequestError(
            f"{' and '.join(name for name, _ in found)} are given; an answer follows one grammar.",
            "Leave all but one out.",
            param=found[1][0],
        )
    return found[0] if found else None


def _of_format(form: ResponseFormat | None) -> list[Asked]:
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [("response_format", ANY_OBJECT)]
    if form.json_schema is None:
        raise RequestError(
            "response_format.json_schema is missing.",
            "Add it, or use the type 'json_object'.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    name = "response_format.json_schema.schema"
    schema = form.json_schema.schema
    return [(name, ANY_OBJECT if schema is None else json_spec(schema, name))]


def _of_outputs(outputs: StructuredOutputs | None) -> list[Asked]:
    if outputs is None:
        return []
    found = _of_fields("structured_outputs.", outputs.json, outputs.regex, outputs.choice)
    if outputs.json_object:
        found.append(("structured_outputs.json_object", ANY_OBJECT))
    return found


def _of_fields(
    prefix: str, schema: object, regex: str | None, choice: list[str] | None
) -> list[Asked]:
    found = []
    if schema is not None:
        name = f"{prefix}json"
        found.append((name, json_spec(_parsed(schema, name), name)))
    if regex is not None:
        found.append((f"{prefix}regex", regex_spec(regex, f"{prefix}regex")))
    if choice is not None:
        found.append((f"{prefix}choice", choice_spec(choice, f"{prefix}choice")))
    return found


def _parsed(schema: object, name: str) -> object:
    """vLLM's fields take a schema as an object or as its text."""
    if not isinstance(schema, str):
        return schema
    if len(schema) > MAX_SCHEMA_CHARS:
        raise bad_grammar(f"{name} has more than {MAX_SCHEMA_CHARS} characters.", name)
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise bad_grammar(f"{name} is not valid JSON: {error}.", name) from error


def marker_ids(text: TextTools) -> dict[str, int]:
    """The markers of the model's answers that are one token, with their ids."""
    found = ((marker, text.tokenizer.token_id(marker)) for marker in text.format.markup.markers)
    return {marker: token for marker, token in found if token is not None}


def placed(
    spec: GrammarSpec, text: TextTools, prompt: Prompt | None, param: str = "response_format"
) -> GrammarSpec:
    """`spec` behind the reasoning that the prompt leaves room for. Where calls are enforced, no
    token of theirs may stand in it.

    Raises:
        RequestError: 400; no token or fixed spelling tells where reasoning ends.
    """
    think = text.format.markup.think
    if prompt is None or think is None or prompt.opening is Opening.CONTENT:
        return spec
    opening, after = (_ids(text, tag) for tag in think)
    barred: tuple[int, ...] = ()
    if spec.kind == "parts":
        barred = tuple(token for tag, token in marker_ids(text).items() if tag not in think)
    if prompt.opening is Opening.EITHER:
        if len(opening) != 1 or not after:
            return spec  # the grammar begins at once: there is no token that opens reasoning
        return msgspec.structs.replace(spec, after=after, opening=opening[0], barred=barred)
    if not after:
        raise RequestError(
            f"This model's tokenizer has no token {think[1]!r} to end its reasoning.",
            "Ask for an answer without reasoning: reasoning_effort 'none'.",
            param=param,
            code="unsupported_parameter",
        )
    return msgspec.structs.replace(spec, after=after, barred=barred)


def _ids(text: TextTools, tag: str) -> tuple[int, ...]:
    """The one way to write `tag` in tokens: its own, or one for each byte; else empty."""
    own = text.tokenizer.token_id(tag)
    if own is not None:
        return (own,)
    ids = text.tokenizer.encode_literal(tag)
    return tuple(ids) if len(ids) == len(tag.encode()) else ()


async def check(asked: Asked, library: str) -> None:
    """Have `library` compile it elsewhere once: what it refuses is refused here. A request waits
    for that no longer than the library takes to start, the queue included.

    Raises:
        RequestError: 400 ``invalid_schema`` with the library's cause; 429 ``queue_full`` when
            checks queue up; 400 ``unsupported_parameter`` without the library.
    """
    name, spec = asked
    require(library)
    key = library, spec.kind, spec.text
    if key in _verdicts:
        _verdicts.move_to_end(key)
    else:
        loop = asyncio.get_running_loop()
        try:
            work = loop.run_in_executor(_pool(), _cause, spec, library)
            cause = await asyncio.wait_for(work, KNOWN[library].start_s)
        except TimeoutError as error:
            raise RequestError(
                f"{name} was not checked within {KNOWN[library].start_s:.0f} s.",
                "Try again later.",
                status=429,
                error_type="rate_limit_error",
                code="queue_full",
                param=name,
                retry_after_s=1.0,
            ) from error
        _verdicts[key] = cause
        while len(_verdicts) > REMEMBERED:
            _verdicts.popitem(last=False)
    if _verdicts[key]:
        raise bad_grammar(f"{name} cannot be enforced: {_verdicts[key]}.", name)


#: What recent checks found, by library, kind and text: the cause of a refusal, or empty.
_verdicts: OrderedDict[tuple[str, str, str], str] = OrderedDict()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "grammar-check")


@cache
def _checker(library: str) -> Checker:
    return Checker(library)


def _cause(spec: GrammarSpec, library: str) -> str:
    try:
        _checker(library).check(spec)
    except GrammarError as error:
        return error.cause
    return ""
