"""A stock engine's command line, read by its table. What the table lacks is never dropped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from metainfer.core.errors import UsageError
from metainfer.doctor.data_files import load, rows

ENGINES = ("sglang", "vllm")

Value = str | int | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StockLine:
    """`given`: values by key. `neutral`: flags on which no audited path depends. `not_understood`:
    words as they stood there."""

    engine: str
    given: Mapping[str, Value] = field(default_factory=dict)
    neutral: tuple[str, ...] = ()
    not_understood: tuple[str, ...] = ()


def table(engine: str) -> str:
    """The engine's data file.

    Raises:
        UsageError: there is no table for it.
    """
    if engine not in ENGINES:
        raise UsageError(
            f"There is no audit for engine {engine!r}.",
            f"Known: {', '.join(ENGINES)}.",
            code="unknown_engine",
        )
    return f"stock-{engine}.toml"


def defaults(engine: str) -> dict[str, Value]:
    """Values of flags that were not given, where the table knows them."""
    return {row["key"]: row["default"] for row in rows(table(engine), "flag") if "default" in row}


def read_line(engine: str, text: str) -> StockLine:
    """Read ``--flag value``, ``--flag=value`` and switches; the last of two values wins.

    Words before the first flag (``python -m sglang.launch_server``, ``vllm serve MODEL``) are the
    engine's own: the last of them that is no such word is taken for the model.

    Raises:
        UsageError: unbalanced quotes, a value that is no number, a flag without its value.
    """
    flags = _flags(engine)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--engine-args cannot be read: {error}.", "Check its quotes.") from error
    given: dict[str, Value] = {}
    neutral: list[str] = []
    unknown: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        name, equals, value = word.partition("=")
        row = flags.get(name.replace("_", "-")) if name.startswith("-") else None
        if row is None:
            if not word.startswith("-"):
                _positional(word, given, unknown)
                continue
            unknown.append(word)
            if not equals and index < len(words) and not words[index].startswith("-"):
                unknown[-1] += f" {words[index]}"
                index += 1
            continue
        if row["kind"] != "switch" and not equals:
            if index >= len(words) or words[index].startswith("--"):
                raise UsageError(f"{name} of {engine} needs a value.", "Give it one.")
            value = words[index]
            index += 1
        if row.get("neutral"):
            neutral.append(name)
        elif value != row.get("unset", object()):
            given[row["key"]] = _value(row, name, value)
    return StockLine(
        engine=engine, given=given, neutral=tuple(neutral), not_understood=tuple(unknown)
    )


_OWN_WORDS = frozenset({"python", "python3", "vllm", "serve", "sglang", "launch_server"})


def _positional(word: str, given: dict[str, Value], unknown: list[str]) -> None:
    if word in _OWN_WORDS or word.startswith(("sglang.", "vllm.")):
        return
    if "model" in given:
        unknown.append(word)
    else:
        given["model"] = word


def _flags(engine: str) -> dict[str, dict[str, Any]]:
    load(table(engine))
    own = {"names": ["-m"], "key": "", "kind": "text", "neutral": True, "origin": "python's own"}
    listed = [*rows(table(engine), "flag"), own]
    return {name: row for row in listed for name in row["names"]}


def _value(row: dict[str, Any], name: str, text: str) -> Value:
    if row["kind"] == "switch":
        return text.lower() not in ("false", "0", "no", "off")
    if row["kind"] == "int":
        if not text.isdigit():
            raise UsageError(f"{name} {text!r} is no whole number.", "Write a whole number.")
        return int(text)
    return text
