"""What the command line declares, read off the application: every verb, every flag.

Help, search, `config`, aliases, the reference page and its tests go through this table, so a flag
that is added to a verb appears in all of them by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument

Chain = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of one verb. `value`: what follows it (``INT``, ``PATH`` ...), empty for a switch.
    `field`: the parameter's name in Python."""

    names: tuple[str, ...]
    field: str
    help: str
    group: str
    value: str
    default: object
    choices: tuple[str, ...] = ()
    repeatable: bool = False
    required: bool = False

    @property
    def name(self) -> str:
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def usual(self) -> str:
        """The default in words; empty where leaving the flag out means "decide"."""
        if self.default is None or self.default == () or self.required or not self.value:
            return ""
        if isinstance(self.default, tuple):
            return " ".join(map(str, self.default))
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


@dataclass(frozen=True)
class Verb:
    """A verb with its flags in order of declaration. `arguments`: words that stand without flag."""

    chain: Chain
    text: str
    example: str
    arguments: tuple[Flag, ...]
    flags: tuple[Flag, ...]

    @property
    def name(self) -> str:
        return " ".join(self.chain)

    @cached_property
    def by_name(self) -> Mapping[str, Flag]:
        return {name: flag for flag in self.flags for name in flag.names}


class Verbs(Mapping[Chain, Verb]):
    """Every verb that runs something, in order of declaration; each is read when asked for."""

    def __init__(self, app: App) -> None:
        self._apps = dict(_walk(app, ()))
        self._read: dict[Chain, Verb] = {}

    def __getitem__(self, chain: Chain) -> Verb:
        if chain not in self._read:
            self._read[chain] = _verb(chain, self._apps[chain])
        return self._read[chain]

    def __iter__(self) -> Iterator[Chain]:
        return iter(self._apps)

    def __len__(self) -> int:
        return len(self._apps)


def _walk(app: App, chain: Chain) -> Iterator[tuple[Chain, App]]:
    for name in app:
        if not name.startswith("-"):
            found = app[name]
            if found.default_command is not None:
                yield (*chain, name), found
            yield from _walk(found, (*chain, name))


def _verb(chain: Chain, app: App) -> Verb:
    arguments: list[Flag] = []
    flags: list[Flag] = []
    for argument in app.assemble_argument_collection():
        if argument.show and argument.parse:
            keyed = any(name.startswith("-") for name in argument.names)
            (flags if keyed else arguments).append(_flag(argument))
    paragraphs = (app.default_command.__doc__ or "").split("\n\n")
    text = " ".join(paragraphs[0].split())
    examples = [part for part in map(str.strip, paragraphs) if part.startswith("Example:")]
    example = " ".join(examples[0].removeprefix("Example:").split()) if examples else ""
    return Verb(chain, text, example, tuple(arguments), tuple(flags))


def _several(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


def _flag(argument: Argument) -> Flag:
    parameter = argument.parameter
    tokens, repeatable = argument.token_count()
    groups = [str(getattr(group, "name", group)) for group in _several(parameter.group)]
    default = argument.field_info.default
    missing = default is argument.field_info.empty
    choices = tuple(argument.get_choices() or ())
    hint = getattr(argument.hint, "__name__", str(argument.hint))
    kinds = {"int": "INT", "float": "FLOAT", "Path": "PATH"}
    value = next((shown for kind, shown in kinds.items() if kind in hint), "TEXT")
    if choices:
        value = "|".join(choices)
    return Flag(
        names=tuple(argument.names),
        field=argument.field_info.name,
        help=parameter.help or "",
        group=groups[0] if groups else "",
        value=value if tokens else "",
        default=None if missing else default,
        choices=choices,
        repeatable=repeatable,
        required=bool(argument.required),
    )
