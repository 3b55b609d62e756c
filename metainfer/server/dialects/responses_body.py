"""The body of ``/v1/responses``: its types and bounds, and the chat request that it means.

Items of one answer (reasoning, text, calls) become one message of the assistant, as chat has it.
Nothing is stored, no tool is run here: fields that ask for it are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from metainfer.core.errors import RequestError
from metainfer.server.bodies import Rules, missing, supported, unsupported
from metainfer.server.dialects.names import Names
from metainfer.server.schemas import (
    IGNORED,
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    Count,
    Effort,
    Label,
    Salt,
    Stops,
    Temperature,
    TopP,
    Variables,
)

Ident = Annotated[str, Meta(max_length=512)] | None
MAX_PARTS = 1024


class InputText(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """Text that is given to the model."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """Text of an earlier answer."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """A refusal in an earlier answer of another model; shown as its text."""

    refusal: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text", forbid_unknown_fields=True):
    """Reasoning in short."""

    text: str


class ReasoningText(
    msgspec.Struct, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True
):
    """Reasoning as it was written."""

    text: str


class MessageItem(
    msgspec.Struct, tag_field="type", tag="message", kw_only=True, forbid_unknown_fields=True
):
    """A message; ``type`` may be left out. `id`, `status` and `phase` change nothing."""

    role: Literal["user", "assistant", "system", "developer"]
    content: (
        str
        | Annotated[
            list[InputText | OutputText | RefusalPart], Meta(min_length=1, max_length=MAX_PARTS)
        ]
    )
    id: Ident = None
    status: Ident = None
    phase: Ident = None

    @property
    def texts(self) -> list[str]:
        if isinstance(self.content, str):
            return [self.content]
        return [
            part.refusal if isinstance(part, RefusalPart) else part.text for part in self.content
        ]


class FunctionCallItem(
    msgspec.Struct, tag_field="type", tag="function_call", kw_only=True, forbid_unknown_fields=True
):
    """A call in an earlier answer."""

    call_id: Label
    name: Label
    arguments: str
    id: Ident = None
    status: Ident = None


class FunctionCallOutputItem(
    msgspec.Struct,
    tag_field="type",
    tag="function_call_output",
    kw_only=True,
    forbid_unknown_fields=True,
):
    """What a call gave."""

    call_id: Label
    output: str | Annotated[list[InputText], Meta(max_length=MAX_PARTS)]
    name: Ident = None
    id: Ident = None
    status: Ident = None


class ReasoningItem(
    msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True, forbid_unknown_fields=True
):
    """Earlier reasoning: `content`, else `summary`. `encrypted_content` alone is refused."""

    summary: Annotated[list[SummaryText], Meta(max_length=MAX_PARTS)] = []
    content: Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None
    id: Ident = None
    status: Ident = None


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``json_object``: any object. ``json_schema``: one that fits `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer's text."""

    format: TextFormat | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How much to reason. `summary` asks for less than is given: all of the reasoning."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing here changes anything."""

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/responses``. Below the blank line: extensions."""

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: Label | None = None

    stop: Stops | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: Variables | None = None
    cache_salt: Salt | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


_ABSENT: tuple[object, ...] = (None, [], {})

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "background": (None, False),
    "context_management": _ABSENT,
    "conversation": (None,),
    "moderation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "service_tier": (None, "auto", "default"),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
_ITEM: dict[str, tuple[object, ...]] = {
    "async": (None, False),
    "caller": (None, {"type": "direct"}),
    "created_by": (None,),
    "namespace": (None,),
}
_TOOL: dict[str, tuple[object, ...]] = {
    "allowed_callers": (None, [], ["direct"]),
    "async": (None, False),
    "defer_loading": (None, False),
    "output_schema": (None,),
}
#: `parsed` and `parsed_arguments` are what OpenAI's clients add to an answer for their users.
_HINTS = ("parsed", "parsed_arguments", "prompt_cache_breakpoint")
_PARTS = ("input_image", "input_file", "input_audio")
#: Items of hosted tools and of stored conversations.
_ITEMS = (
    "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
    "computer_call", "computer_call_output", "custom_tool_call", "custom_tool_call_output",
    "file_search_call", "image_generation_call", "item_reference", "local_shell_call",
    "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "mcp_list_tools", "shell_call", "shell_call_output", "tool_search_call",
    "tool_search_output", "web_search_call",
)  # fmt: skip


def _shape(fields: dict[str, Any]) -> None:
    if isinstance(fields.get("input"), list):
        fields["input"] = [_item(f"input[{i}]", item) for i, item in enumerate(fields["input"])]
    for place, tool in enumerate(_list(fields, "tools")):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise unsupported(
                f"tools[{place}].type", kind, "Send function tools, and run them yourself."
            )
    for field, neutral in (
        ("text", {"verbosity": (None, "medium")}),
        ("reasoning", {"context": (None, "auto"), "mode": (None, "standard")}),
    ):
        if isinstance(fields.get(field), dict):
            fields[field] = supported(fields[field], (), neutral, f"{field}.")
    for place, name in enumerate(_list(fields, "include")):
        if isinstance(name, str) and name != "reasoning.encrypted_content":
            raise unsupported(f"include[{place}]", name, "Leave it out.")


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    return value if isinstance(value, list) else []


def _item(where: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind in _ITEMS:
        raise unsupported(
            f"{where}.type", kind, "Nothing is stored and no tool is run here: send whole items."
        )
    fields = supported(value, (), _ITEM, f"{where}.")
    fields.pop("parsed_arguments", None)
    if "type" not in fields and "role" in fields:
        fields["type"] = "message"
    for name in ("content", "output", "summary"):
        parts = fields.get(name)
        if isinstance(parts, list):
            fields[name] = [_part(f"{where}.{name}[{i}]", part) for i, part in enumerate(parts)]
    return fields


def _part(where: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "type" not in value:
        raise missing(f"{where}.type")
    if value["type"] in _PARTS:
        raise unsupported(f"{where}.type", value["type"], "Send text parts only.")
    return {name: item for name, item in value.items() if name not in _HINTS}


RULES = Rules(_UNSUPPORTED, IGNORED, _shape)

_NAMES = {
    r"(?<=\])\.function(?=\.)": "",
    r"\bresponse_format\.json_schema\b": "text.format",
    r"\bresponse_format\b": "text.format",
    r"\breasoning_effort\b": "reasoning.effort",
    r"\btool_call_id\b": "call_id",
    r"\btool_calls\b": "function_call",
    r"\bmessages\b(?!\[)": "input",
}


def chat_of(body: ResponsesRequest) -> tuple[ChatRequest, Names]:
    """The chat request that `body` means, and how to name its fields to the client.

    Raises:
        RequestError: 400 for a choice of tools, reasoning or a format that chat cannot say.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
        places.append("instructions")
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        places.append("input")
    else:
        _add_items(body.input, messages, places)
    names = Names(_NAMES, places)
    reasoning = body.reasoning
    chat = names.chat_request(
        {
            "model": body.model,
            "messages": messages,
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stop": body.stop,
            "ignore_eos": body.ignore_eos,
            "tools": [_tool(place, tool) for place, tool in enumerate(body.tools or ())] or None,
            "tool_choice": _choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning_effort": None if reasoning is None else reasoning.effort,
            "response_format": _format(body.text),
            "user": body.user,
            "chat_template_kwargs": body.chat_template_kwargs,
            "cache_salt": body.cache_salt,
            "priority": body.priority,
        }
    )
    return chat, names


def _add_items(items: Sequence[Item], messages: list[dict[str, Any]], places: list[str]) -> None:
    answer: dict[str, Any] | None = None  # the assistant's message under way
    was_text = False  # a text straight after a text begins an answer of its own
    for place, item in enumerate(items):
        where = f"input[{place}]"
        is_text = isinstance(item, MessageItem) and item.role == "assistant"
        if isinstance(item, FunctionCallOutputItem):
            texts = item.output
            shown = texts if isinstance(texts, str) else _parts([part.text for part in texts])
            message = {"role": "tool", "tool_call_id": item.call_id, "content": shown}
        elif isinstance(item, MessageItem) and not is_text:
            message = {"role": item.role, "content": _parts(item.texts)}
        else:
            if answer is None or (is_text and was_text):
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
                places.append(where)
            _extend(answer, where, item)
            was_text = is_text
            continue
        answer, was_text = None, False
        messages.append(message)
        places.append(where)


def _parts(texts: Sequence[str]) -> str | list[dict[str, str]]:
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] or ""


def _extend(answer: dict[str, Any], where: str, item: Item) -> None:
    if isinstance(item, MessageItem):
        answer["content"] += "".join(item.texts)
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        calls = answer.setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        text = "".join(part.text for part in item.content or item.summary)
        if not text and item.encrypted_content:
            raise unsupported(
                where, "encrypted_content", "Send reasoning as text, or leave the item out."
            )
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text


def _tool(place: int, tool: dict[str, Any]) -> dict[str, Any]:
    if "type" not in tool:
        raise missing(f"tools[{place}].type")
    function = supported(tool, (), _TOOL, f"tools[{place}].")
    return {"type": function.pop("type"), "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return _named("tool_choice", choice)
    if choice.get("type") != "allowed_tools":
        raise unsupported(
            "tool_choice.type",
            choice.get("type"),
            "Use 'auto', 'none', 'required', a function or allowed_tools of functions.",
        )
    tools = [
        _named(f"tool_choice.tools[{place}]", tool)
        for place, tool in enumerate(_list(choice, "tools"))
    ]
    allowed = {"mode": choice.get("mode", "auto"), "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _named(where: str, tool: object) -> dict[str, Any]:
    """A function that a choice names, in chat's form."""
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            f"{where} names no function.",
            "Send {'type': 'function', 'name': ...}.",
            param=where,
        )
    return {"type": "function", "function": {"name": name}}


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    if form.schema is None:
        raise missing("text.format.schema")
    wrapper = {
        "name": form.name,
        "schema": form.schema,
        "description": form.description,
        "strict": form.strict,
    }
    return {"type": form.type, "json_schema": wrapper}
