"""From a chat body to a `Conversation`: tools, calls and their results checked, switches read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from metainfer.core.errors import RequestError
from metainfer.engine.model_text import TextTools
from metainfer.server.schemas import ChatRequest, Message, Tool
from metainfer.server.tool_choice import choice_of
from metainfer.text.dialogue import EFFORTS, SWITCHES, Conversation, ToolUse, Turn

_RESERVED = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt"})
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def conversation_of(text: TextTools, body: ChatRequest) -> Conversation:
    """What the model is to be shown.

    Raises:
        RequestError: 400 for tools that this model's answers cannot be read for, for a choice
            of none that is offered, for results without a call, for bad switches.
    """
    tools = offered_tools(text, body)
    variables, thinking, effort = _switches(body)
    turns = turns_of(body.messages)
    goes_on = _goes_on(body)
    return Conversation(
        turns=turns,
        tools=tools,
        thinking=thinking,
        effort=effort,
        open_answer=body.add_generation_prompt is not False and not goes_on,
        continue_last=goes_on,
        variables=variables,
    )


def offered_tools(text: TextTools, body: ChatRequest) -> tuple[Mapping[str, Any], ...]:
    """The function objects to show, exactly as sent; none when the choice is ``none``."""
    tools = [_function(place, tool) for place, tool in enumerate(body.tools or ())]
    if choice_of(body).mode == "none" or not tools:
        return ()
    names = [str(tool["name"]) for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"Two tools are named {twice!r}.", "Rename one.", param="tools")
    if text.format.markup.calls is None:
        raise RequestError(
            "This model's prompt format shows no form of tool calls that can be read here.",
            "Leave tools out, or start the server with --chat-template FILE for one that does.",
            param="tools",
            code="unsupported_parameter",
        )
    return tuple(tools)


def _function(place: int, tool: Tool) -> Mapping[str, Any]:
    function = tool.function
    where = f"tools[{place}].function"
    name = function.get("name")
    if name is None:
        raise RequestError(
            f"{where}.name is missing.", "Add it.", param=f"{where}.name",
            code="missing_required_parameter",
        )  # fmt: skip
    wrong = None
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        wrong = "name", "1 to 64 letters, digits, '_', '-' or '.'"
    elif not isinstance(function.get("description", ""), str | None):
        wrong = "description", "text"
    elif not isinstance(function.get("parameters", {}), dict | None):
        wrong = "parameters", "a JSON schema"
    if wrong is not None:
        raise RequestError(
            f"{where}.{wrong[0]} is not {wrong[1]}.",
            param=f"{where}.{wrong[0]}",
            code="invalid_value",
        )
    return cast("Mapping[str, Any]", function)


def turns_of(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Messages as turns; results of tools must answer a call of the answer before them."""
    turns = []
    open_calls: dict[str, bool] = {}  # id -> whether it was answered
    for place, message in enumerate(messages):
        content = message.content
        pieces = [content] if isinstance(content, str) else [part.text for part in content or ()]
        calls = tuple(
            ToolUse(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        )
        if message.role == "tool":
            _check_result(place, message.tool_call_id, open_calls)
        else:
            open_calls = _open(place, calls)
        reasoning = message.reasoning_content
        turns.append(
            Turn(
                message.role,
                tuple(pieces),
                name=message.name,
                reasoning=message.reasoning if reasoning is None else reasoning,
                calls=calls,
                call_id=message.tool_call_id,
            )
        )
    return tuple(turns)


def _open(place: int, calls: Sequence[ToolUse]) -> dict[str, bool]:
    found = {call.id: False for call in calls}
    if len(found) != len(calls):
        where = f"messages[{place}].tool_calls"
        raise RequestError(f"Two calls in {where} have one id.", "Use each id once.", param=where)
    return found


def _check_result(place: int, call_id: str | None, open_calls: dict[str, bool]) -> None:
    where = f"messages[{place}].tool_call_id"
    if call_id is None:
        raise RequestError(
            f"{where} is missing.", "Add it.", param=where, code="missing_required_parameter"
        )
    if open_calls.get(call_id) is not False:
        cause = "was answered already" if call_id in open_calls else "is no call of the answer"
        raise RequestError(
            f"{where} {call_id[:100]!r} {cause} before it.",
            "Send each result once, after the assistant message whose tool_calls hold its id.",
            param=where,
        )
    open_calls[call_id] = True


def _goes_on(body: ChatRequest) -> bool:
    """Whether the last message is an answer to be continued."""
    last = len(body.messages) - 1
    marked = [place for place, message in enumerate(body.messages) if message.prefix]
    wanted = bool(body.continue_final_message) or marked == [last]
    field = "continue_final_message" if not marked else f"messages[{marked[0]}].prefix"
    if (marked and marked != [last]) or (wanted and body.messages[last].role != "assistant"):
        raise RequestError(
            f"{field} is set, but only a last message of the assistant can be continued.",
            "Leave it out, or end the messages with the answer's beginning.",
            param=field,
        )
    if wanted and body.add_generation_prompt:
        raise RequestError(
            f"{field} contradicts add_generation_prompt.", "Leave one out.", param=field
        )
    return wanted


def _switches(body: ChatRequest) -> tuple[dict[str, Any], bool | None, str | None]:
    """(template variables, thinking, effort) out of the body and its chat_template_kwargs."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in _RESERVED or not name.isidentifier():
            raise RequestError(
                f"Template variable {name[:100]!r} cannot be set.",
                "Use another name in chat_template_kwargs.",
                param="chat_template_kwargs",
            )
    found = {name: variables.pop(name) for name in SWITCHES if name in variables}
    values = list(found.values())
    if any(not isinstance(value, bool) for value in values) or len(set(values)) > 1:
        raise RequestError(
            f"{' and '.join(found)} in chat_template_kwargs must be true or false, and agree.",
            param="chat_template_kwargs",
        )
    effort: Any = variables.pop("reasoning_effort", body.reasoning_effort)
    if effort is not None and effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort is {str(effort)[:100]!r}.",
            f"Use one of {', '.join(EFFORTS)}.",
            param="chat_template_kwargs",
        )
    return variables, values[0] if values else None, effort


def size_of(body: ChatRequest) -> int:
    """Roughly the characters that rendering will touch."""
    texts = sum(len(message.content or ()) for message in body.messages)
    calls = sum(
        len(call.function.arguments)
        for message in body.messages
        for call in message.tool_calls or ()
    )
    tools = len(msgspec.json.encode(body.tools)) if body.tools else 0
    return len(body.messages) * 64 + texts + calls + tools
