"""Chat templates: the publisher's Jinja text, rendered as `transformers` renders it.

Sandboxed and immutable, with the same options, filters and globals (`trim_blocks`,
`lstrip_blocks`, loop controls, ``tojson`` without HTML escapes, ``raise_exception``,
``strftime_now``, ``{% generation %}``). Output size and, where a template gives a chance to
look, time are bounded. Source: `transformers/utils/chat_template_utils.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.exceptions
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from metainfer.core.errors import ModelError, RequestError
from metainfer.text.tokenizer import read_json

MAX_CHARS = 16_000_000
MAX_SECONDS = 10.0
MAX_MESSAGES = 4096

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_deadline: ContextVar[float] = ContextVar("chat_template_deadline", default=float("inf"))
_clock: ContextVar[Callable[[], datetime]] = ContextVar("chat_template_clock", default=datetime.now)


class _Limit(jinja2.TemplateError):
    """A bound was hit."""


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise _Limit("the template takes too long")


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds looked at wherever a template calls, reads or multiplies."""

    intercepted_binops = frozenset(["*", "**"])

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_time()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                size = len(sized) if hasattr(sized, "__len__") else 0
                if isinstance(times, int) and size * times > MAX_CHARS:
                    raise _Limit("the template multiplies a sequence too often")
        elif isinstance(right, int) and abs(right) > 1024:
            raise _Limit("the template raises to too high a power")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without attributes that could reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameters, as in Jinja: a template may use any name, `self` included.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r} (underscore)")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return _clock.get()().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _dict
    return environment


class ChatTemplate:
    """One or several named templates of a model; ``default`` and ``tool_use`` are chosen from."""

    def __init__(
        self,
        templates: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_chars: int = MAX_CHARS,
        max_seconds: float = MAX_SECONDS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens` (``bos_token`` ...) become variables. `ModelError` for bad syntax."""
        named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._sources = named
        self._special = dict(special_tokens or {})
        self._max_chars, self._max_seconds, self._now = max_chars, max_seconds, now
        self._compiled = {name: _compile(name, text) for name, text in named.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the templates; empty when the model has none."""
        return tuple(self._sources)

    def source(self, name: str = "default") -> str | None:
        """Text of template `name`, or None."""
        return self._sources.get(name)

    @classmethod
    def from_folder(
        cls, path: str | Path, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate:
        """``chat_template.jinja`` and ``additional_chat_templates/``, else the one(s) in
        ``tokenizer_config.json`` or ``chat_template.json``; none of them is fine."""
        folder = Path(path)
        named: dict[str, str] = {}
        for holder in ("chat_template.json", "tokenizer_config.json"):
            named.update(_named(read_json(folder / holder).get("chat_template"), folder / holder))
        if (folder / "chat_template.jinja").is_file():
            named["default"] = _read_text(folder / "chat_template.jinja")
        for extra in sorted(folder.glob("additional_chat_templates/*.jinja")):
            named[extra.stem] = _read_text(extra)
        return cls(named, special_tokens)

    @classmethod
    def from_gguf_metadata(
        cls, metadata: Mapping[str, Any], special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate:
        """``tokenizer.chat_template`` and ``tokenizer.chat_template.<name>``."""
        named = {}
        for key, value in metadata.items():
            head, _, name = key.partition("tokenizer.chat_template")
            if not head and (name == "" or name.startswith(".")) and isinstance(value, str):
                named[name[1:] or "default"] = value
        return cls(named, special_tokens)

    @classmethod
    def from_file(
        cls, path: str | Path, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate:
        """A template file that the user names (``--chat-template``)."""
        return cls(_read_text(Path(path)), special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt; encode it with ``add_special=False``.

        Keys of a message whose value is None are left out, as `transformers` does. Content given
        as text parts is joined with newlines unless the template reads parts itself. `kwargs`
        are further template variables. `RequestError` carries the template's own message.
        """
        template = self._choose(tools)
        taken = [name for name in kwargs if name in _RESERVED]
        if taken:
            raise RequestError(
                f"Template variable {taken[0]!r} is reserved.",
                "Use another name in chat_template_kwargs.",
                param="chat_template_kwargs",
            )
        if len(messages) > MAX_MESSAGES:
            raise RequestError(
                f"{len(messages)} messages are given, at most {MAX_MESSAGES} may be.",
                "Send fewer messages.",
                param="messages",
            )
        shown = [self._message(message) for message in messages]
        variables = self._variables(shown, tools, add_generation_prompt)
        return self._run(template, {**variables, **kwargs})

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the default template reads content given as ``[{"type": "text", ...}]``."""
        parts = [{"type": "text", "text": "probe-7f3a"}]
        probe = [{"role": "user", "content": parts}]
        try:
            text = self._run(self._choose(None), self._variables(probe, None, True))
        except RequestError:
            return False
        # A template that prints the list as a whole shows its keys, too.
        return "probe-7f3a" in text and "'text'" not in text and '"text"' not in text

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in message.items() if value is not None}
        if isinstance(kept.get("content"), list) and not self.takes_parts:
            kept["content"] = "\n".join(_part_text(part) for part in kept["content"])
        return kept

    def _variables(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool
    ) -> dict[str, Any]:
        return {
            **self._special,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _choose(self, tools: object) -> jinja2.Template:
        if tools and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        if "default" in self._compiled:
            return self._compiled["default"]
        if len(self._compiled) == 1:
            return next(iter(self._compiled.values()))
        raise RequestError(
            "This model has no chat template.",
            "Use /v1/completions, or start the server with --chat-template FILE.",
            code="no_chat_template",
            param="messages",
        )

    def _run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        deadline = _deadline.set(time.monotonic() + self._max_seconds)
        clock = _clock.set(self._now)
        parts: list[str] = []
        size = 0
        try:
            for part in template.generate(variables):
                size += len(part)
                if size > self._max_chars:
                    raise _Limit(f"the prompt exceeds {self._max_chars} characters")
                _check_time()
                parts.append(part)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            raise RequestError(
                f"The chat template refuses the messages: {str(error) or type(error).__name__}.",
                "Change the messages to what the model's template accepts.",
                code="chat_template_error",
                param="messages",
            ) from error
        finally:
            _clock.reset(clock)
            _deadline.reset(deadline)
        return "".join(parts)


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(
            f"A message holds a content part of type {kind!r} that is not text.",
            "This model reads text only.",
            code="unsupported_content",
            param="messages",
        )
    return text


def _compile(name: str, text: str) -> jinja2.Template:
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"Chat template {name!r} is not valid Jinja, line {error.lineno}: {error.message}.",
            "Pass a corrected one with --chat-template FILE.",
            code="bad_chat_template",
        ) from error
    except (RecursionError, MemoryError, OverflowError) as error:
        raise ModelError(
            f"Chat template {name!r} is too deeply nested.",
            "Pass another one with --chat-template FILE.",
            code="bad_chat_template",
        ) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"Chat template {path} cannot be read: {error}.", "Check the path; it is UTF-8 text."
        ) from error


def _named(value: Any, where: Path) -> dict[str, str]:
    """A template given as text, or as a list of ``{"name", "template"}``."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        named = {
            entry["name"]: entry["template"]
            for entry in value
            if isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
        if len(named) == len(value):
            return named
    raise ModelError(
        f"chat_template in {where} is neither text nor a list of named templates.",
        "Download the file again or pass --chat-template FILE.",
        code="bad_chat_template",
    )
