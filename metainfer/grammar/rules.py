"""What a grammar may be before a library sees it: bounds on size and depth, choices as a regex.

The bounds keep one request from costing the server or the engine's loop more than a few
milliseconds; what is left to the library is bounded by its own fuel (`llg`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from metainfer.core.errors import RequestError
from metainfer.core.request import GrammarSpec

MAX_SCHEMA_CHARS = 65_536
MAX_SCHEMA_DEPTH = 64
MAX_TEXT_CHARS = 4_096  # of one text in a schema: what is forced is spelled anew for every mask
REMARKS = ("description", "$comment")  # texts that no answer holds
MAX_REGEX_CHARS = 8_192
MAX_CHOICES = 1_024
MAX_CHOICE_CHARS = 32_768  # of all choices together

MAX_PARTS_CHARS = 1_048_576  # of an answer that may hold calls, all schemas of its tools included

ANY_OBJECT = GrammarSpec("json", '{"type":"object"}')


def bad_grammar(cause: str, param: str | None = None, remedy: str = "") -> RequestError:
    """The 400 for a grammar that cannot be enforced."""
    return RequestError(cause, remedy, param=param, code="invalid_schema")


def json_spec(schema: object, param: str) -> GrammarSpec:
    """The grammar of a JSON schema.

    Raises:
        RequestError: 400 ``invalid_schema``; no object, too large or nested too deeply.
    """
    if not isinstance(schema, dict):
        raise bad_grammar(f"{param} is not a JSON schema.", param, "Send an object.")
    if _deeper_than(schema, MAX_SCHEMA_DEPTH):
        raise bad_grammar(
            f"{param} is nested more than {MAX_SCHEMA_DEPTH} levels deep.", param, "Flatten it."
        )
    longest = _longest_text(schema)
    if longest > MAX_TEXT_CHARS:
        raise bad_grammar(
            f"{param} holds a text of {longest} characters, at most {MAX_TEXT_CHARS} may be.",
            param,
            "Shorten it.",
        )
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_SCHEMA_CHARS:
        raise bad_grammar(
            f"{param} has {len(text)} characters, at most {MAX_SCHEMA_CHARS} may be.",
            param,
            "Send a smaller schema.",
        )
    return GrammarSpec("json", text)


def regex_spec(pattern: str, param: str) -> GrammarSpec:
    """The grammar of a regular expression over the whole answer.

    Raises:
        RequestError: 400 ``invalid_schema``; it is empty or too long.
    """
    if not 0 < len(pattern) <= MAX_REGEX_CHARS:
        raise bad_grammar(
            f"{param} has {len(pattern)} characters; 1 to {MAX_REGEX_CHARS} may be.", param
        )
    return GrammarSpec("regex", pattern)


def choice_spec(choices: Sequence[str], param: str) -> GrammarSpec:
    """The grammar of a list of texts, one of which is the whole answer.

    Raises:
        RequestError: 400 ``invalid_schema``; none, too many, an empty one, too many characters.
    """
    if not 0 < len(choices) <= MAX_CHOICES:
        raise bad_grammar(f"{param} has {len(choices)} texts; 1 to {MAX_CHOICES} may be.", param)
    if not all(choices):
        raise bad_grammar(f"{param} holds an empty text.", param, "Leave it out.")
    total = sum(map(len, choices))
    if total > MAX_CHOICE_CHARS:
        raise bad_grammar(
            f"{param} has {total} characters, at most {MAX_CHOICE_CHARS} may be.", param
        )
    return GrammarSpec("choice", json.dumps(list(choices), ensure_ascii=False))


def choice_regex(text: str) -> str:
    """A regular expression for a ``choice`` grammar's text; every character stands for itself."""
    choices: list[str] = json.loads(text)
    return "|".join("".join(map(literal_regex, choice)) for choice in dict.fromkeys(choices))


def literal_regex(char: str) -> str:
    """A regular expression for one character."""
    # Letters and digits of ASCII mean themselves everywhere; the rest is written by number.
    return char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):X}}}"


def _longest_text(schema: dict[str, Any]) -> int:
    """The length of the longest key or value; the schema is not deep."""
    longest = 0
    rest: list[Any] = [schema]
    for item in rest:  # grows as it is walked
        if isinstance(item, str):
            longest = max(longest, len(item))
        elif isinstance(item, dict):
            rest += item
            rest += [v for k, v in item.items() if not (k in REMARKS and isinstance(v, str))]
        elif isinstance(item, list):
            rest += item
    return longest


def _deeper_than(value: Any, limit: int) -> bool:
    """Whether containers nest more than `limit` levels, without recursion."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True
