"""Where values come from: the command line over the environment over ``--config FILE``.

Before a command line is parsed its words are put in order: vLLM's spellings become ours, a file's
entries become flags in front of those that were written. What was set, to what and by whom is kept
for the plan's decisions, the start-up screen and ``config``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metainfer.cli import config_file, vllm_names
from metainfer.cli.declared import Chain, Flag, Verb
from metainfer.core import env
from metainfer.core.errors import UsageError
from metainfer.core.ledger import Origin

CONFIG = "--config"
COMMAND_LINE = "the command line"
SECRET = frozenset({"--api-key", "--admin-key"})
_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True, slots=True)
class Setting:
    """One flag that somebody set. `said`: who, in words."""

    flag: str
    values: tuple[str, ...]
    origin: Origin
    said: str

    @property
    def shown(self) -> str:
        """The value for people; a secret is not."""
        return "(secret)" if self.flag in SECRET else ", ".join(self.values)


@dataclass(slots=True)
class Settings:
    """What a command line amounts to. `words`: what is parsed. `notes`: lines for the user.
    `answers`: forms of answers that a parser's name asks for, empty when none did."""

    verb: Verb | None = None
    words: list[str] = field(default_factory=list)
    given: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    answers: tuple[str, ...] = ()

    def blame(self, text: str) -> str:
        """Where a flag that an error names was set, if not on the command line."""
        for name, setting in self.given.items():
            if setting.origin is not Origin.FLAG and re.search(rf"{name}(?![\w-])", text):
                return f"{name} was set by {setting.said}."
        return ""


current = Settings()
"""The settings of this run; `main` replaces them."""


@dataclass(slots=True)
class _Item:
    """A flag with its value as it was written; `flag` None: a word of its own."""

    words: list[str]
    flag: Flag | None = None
    value: str = ""
    said: str = COMMAND_LINE


def gather(words: Sequence[str], verbs: Mapping[Chain, Verb]) -> Settings:
    """Put the words of a command line in order.

    Raises:
        UsageError: an alias that cannot be honoured, a flag given under two names, a bad file.
    """
    verb = _verb_of(words, verbs)
    if verb is None:
        return Settings(words=list(words))
    made = Settings(verb)
    written = _items(words[len(verb.chain) :], verb, made, COMMAND_LINE)
    file = next((i.value for i in written if i.flag is not None and i.flag.name == CONFIG), None)
    entries = [] if file is None else _file_items(Path(file), verb, verbs, made)
    _note(made, written, Origin.FLAG)
    for variable in env.VARIABLES:
        text = env.get(variable.name)
        if variable.flag in verb.by_name and variable.flag not in made.given and text:
            said = f"the environment's {variable.name}"
            made.given[variable.flag] = Setting(variable.flag, (text,), Origin.ENV, said)
    kept = [item for item in entries if item.flag is None or item.flag.name not in made.given]
    _note(made, [item for item in kept if item.flag is not None], Origin.FILE)
    named = any(item.flag is None and not item.words[0].startswith("-") for item in written)
    for item in kept:
        if named and (item.flag is None or item.flag.name == "--model"):
            continue  # the command line names a model
        made.words += item.words
    made.words = [*verb.chain, *made.words]
    for item in written:
        made.words += item.words
    return made


def _verb_of(words: Sequence[str], verbs: Mapping[Chain, Verb]) -> Verb | None:
    for length in (2, 1):
        if (found := verbs.get(tuple(words[:length]))) is not None:
            return found
    return None


def _note(made: Settings, items: Iterable[_Item], origin: Origin) -> None:
    for item in items:
        if item.flag is None:
            continue
        name = item.flag.name
        before = made.given.get(name)
        values = (*(before.values if before is not None else ()), item.value)
        made.given[name] = Setting(name, values, origin, item.said)


def _items(words: Sequence[str], verb: Verb, made: Settings, said: str) -> list[_Item]:
    """Flags with their values, in order; vLLM's spellings mapped."""
    found: list[_Item] = []
    parts: dict[str, tuple[str, str]] = {}
    aliased: dict[str, str] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            found += [_Item([rest]) for rest in (word, *words[at:])]
            break
        name, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-" or _NUMBER.match(word):
            found.append(_Item([word]))
            continue
        flag = verb.by_name.get(name)
        alias = None if flag is not None else _alias(name, verb)
        if flag is None and alias is None:
            found.append(_Item([word]))
            continue
        takes = bool(flag.value) if flag is not None else alias is not None and alias.takes
        if takes and not equals and at < len(words):
            value = words[at]
            at += 1
        elif takes and not equals:
            raise UsageError(f"{name} needs a value.", f"See metainfer {verb.name} --help.")
        if flag is not None:
            found.append(_same(flag, word, value, equals, said))
        elif alias is not None:
            item = _mapped(alias, name, value, verb, (made, parts), said)
            if item is not None:
                aliased[item.flag.name if item.flag is not None else ""] = name
                found.append(item)
    if parts:
        flag = verb.by_name["--parallel"]
        value = vllm_names.parallel({part: size for part, (size, _) in parts.items()})
        spelled = " ".join(written for _, written in parts.values())
        made.notes.append(f"{spelled} {'is' if len(parts) == 1 else 'are'} --parallel {value} here")
        found.append(_Item([flag.name, value], flag, value, f"{said} ({spelled})"))
        aliased[flag.name] = spelled
    _once(found, aliased)
    return found


def _once(items: Sequence[_Item], aliased: Mapping[str, str]) -> None:
    """Refuse a flag that is given under two names."""
    for name, alias in aliased.items():
        values = [i.value for i in items if i.flag is not None and i.flag.name == name]
        repeatable = any(i.flag.repeatable for i in items if i.flag and i.flag.name == name)
        if len(values) > 1 and not repeatable:
            raise UsageError(f"{alias} is {name} here, and both are given.", "Keep one of them.")


def _same(flag: Flag, word: str, value: str, equals: str, said: str) -> _Item:
    """A flag of ours; ``--dtype`` also takes vLLM's words for types."""
    if flag.name == "--dtype" and (ours := vllm_names.dtype(value)) != value:
        return _Item([] if ours is None else [flag.name, ours], flag, ours or "auto", said)
    shown = [word] if equals or not flag.value else [word, value]
    return _Item(shown, flag, value or "true", said)


def _alias(name: str, verb: Verb) -> vllm_names.Alias | None:
    """The row of `name`, where `verb` runs or plans an engine."""
    if "--context" not in verb.by_name:
        return None
    name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    return vllm_names.BY_NAME.get(name)


def _mapped(
    alias: vllm_names.Alias,
    name: str,
    value: str,
    verb: Verb,
    into: tuple[Settings, dict[str, tuple[str, str]]],
    said: str,
) -> _Item | None:
    """The item that an alias becomes; None where nothing is to be set, or it is a part."""
    made, parts = into
    written = f"{name} {value}" if alias.takes else name
    if alias.part:
        parts[alias.part] = value, written
        return None
    ours = vllm_names.value_of(alias, value)
    if alias.ours == vllm_names.MODEL:
        made.notes.append(f"{name} is the first word here: metainfer {verb.name} {value}")
        return _Item([value], None, value)
    if alias.name in ("--tool-call-parser", "--reasoning-parser"):
        rows = vllm_names.ANSWERS[value]
        made.answers = tuple(r for r in made.answers if r in rows) if made.answers else rows
    if alias.already or ours is None:
        why = alias.already or "the planner decides"
        made.notes.append(f"{written}: nothing to set here, {why}")
        return None
    flag = verb.by_name.get(alias.ours)
    if flag is None:
        raise UsageError(
            f"{name} is {alias.ours} here, which {verb.name} does not have.", "Leave it out."
        )
    shown = f"{flag.name} {ours}" if flag.value else flag.name
    plain = ours == value or not flag.value
    made.notes.append(f"{name if plain else written} is {flag.name if plain else shown} here")
    words = [flag.name, ours] if flag.value else [flag.name]
    return _Item(words, flag, ours or "true", f"{said} ({written})")


def _file_items(path: Path, verb: Verb, verbs: Mapping[Chain, Verb], made: Settings) -> list[_Item]:
    """The file's entries as items, each saying its line."""
    elsewhere = {name for other in verbs.values() for name in other.by_name}
    found: list[_Item] = []
    aliased: list[tuple[str, list[str]]] = []
    unused = []
    for entry in config_file.read(path):
        said = f"{CONFIG} {path} line {entry.line}"
        name = f"--{entry.key}"
        flag = verb.by_name.get(name)
        if name == CONFIG:
            raise UsageError(f"{said} names another file.", "Name it on the command line.")
        if flag is None and entry.key == "model" and verb.arguments:
            found.append(_Item([str(entry.value)], None, str(entry.value), said))
        elif flag is not None:
            found += _entry_items(flag, entry, said)
        elif (alias := _alias(name, verb)) is not None:
            words = [name] if alias.takes is False else [name, _json_or_text(entry.value)]
            if entry.value is not False:
                aliased.append((said, words))
        elif name in elsewhere:
            unused.append(entry.key)
        else:
            raise _unknown(entry, said, verb)
    parts = [(said, words) for said, words in aliased if vllm_names.is_part(words[0])]
    if parts:  # -tp, -dp and -ep are one layout
        lines = ", ".join(said.rpartition(" ")[2] for said, _ in parts)
        said = f"{CONFIG} {path} line {lines}"
        found += _items([word for _, words in parts for word in words], verb, made, said)
    for said, words in aliased:
        if not vllm_names.is_part(words[0]):
            found += _items(words, verb, made, said)
    _once(found, {i.flag.name: i.said for i in found if i.flag is not None and "(" in i.said})
    if unused:
        made.notes.append(f"{CONFIG} {path}: {', '.join(unused)} not used by {verb.name}")
    return found


def _json_or_text(value: config_file.Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _entry_items(flag: Flag, entry: config_file.Entry, said: str) -> list[_Item]:
    value = entry.value
    if not flag.value:
        if not isinstance(value, bool):
            raise UsageError(f"{said} sets {flag.name} to {value!r}.", "Write true or false.")
        return [_Item([flag.name], flag, "true", said)] if value else []
    try:
        texts = config_file.texts(value)
    except ValueError as error:
        raise UsageError(
            f"{said} sets {flag.name} to what it cannot be: {error}.",
            f"Write a value as after {flag.name}.",
        ) from error
    if len(texts) > 1 and not flag.repeatable:
        raise UsageError(f"{said} gives {flag.name} {len(texts)} values.", "Give it one.")
    return [
        item
        for text in texts
        if (item := _same(flag, f"{flag.name}={text}", text, "=", said)).flag is not None
    ]


def _unknown(entry: config_file.Entry, said: str, verb: Verb) -> UsageError:
    known = [name.removeprefix("--") for name in (*verb.by_name, *vllm_names.BY_NAME)]
    near = difflib.get_close_matches(entry.key, known, n=1)
    return UsageError(
        f"{said}: {entry.key} is no flag of {verb.name}.",
        f"Did you mean {near[0]}?" if near else f"See metainfer {verb.name} --help.",
        code="unknown_key",
    )
