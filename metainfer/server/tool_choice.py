"""`tool_choice`: ``auto``, ``none``, ``required``, one named function, or ``allowed_tools``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from metainfer.core.errors import RequestError
from metainfer.server.schemas import ChatRequest


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names`: the tools that may be called, all where None. `one`: at most one call."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None
    one: bool = False


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class _AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[_Named]


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


def choice_of(body: ChatRequest) -> ToolChoice:
    """What `body` says about calls.

    Raises:
        RequestError: 400; an unknown word or form, a tool that is not offered, no tools to call.
    """
    given, one = body.tool_choice, body.parallel_tool_calls is False
    if given is None or given == "auto":
        return ToolChoice(one=one)
    if given == "none":
        return ToolChoice("none")
    offered = [tool.function.get("name") for tool in body.tools or ()]
    if isinstance(given, str):
        if given != "required":
            raise _bad(f"tool_choice is {given[:100]!r}.", "Use 'auto', 'none' or 'required'.")
        choice = ToolChoice("required", one=one)
    elif given.get("type") == "allowed_tools":
        allowed = _read(given, _Allowed).allowed_tools
        names = tuple(dict.fromkeys(tool.function.name for tool in allowed.tools))
        choice = ToolChoice(allowed.mode, names, one)
    else:
        choice = ToolChoice("required", (_read(given, _Named).function.name,), one=True)
    if not offered or choice.names == ():
        raise _bad("tool_choice asks for a call, and no tool is offered.", "Send tools.")
    unknown = next((name for name in choice.names or () if name not in offered), None)
    if unknown is not None:
        raise _bad(f"tool_choice names {unknown[:100]!r}, which no tool is.", "Name one of tools.")
    return choice


def _bad(cause: str, remedy: str) -> RequestError:
    return RequestError(cause, remedy, param="tool_choice", code="invalid_value")


def _read(given: Mapping[str, Any], form: type[Any]) -> Any:
    try:
        return msgspec.convert(given, form)
    except msgspec.ValidationError as error:
        raise _bad(
            f"tool_choice has none of the known forms: {error}.",
            "Send {'type': 'function', 'function': {'name': ...}}.",
        ) from error
