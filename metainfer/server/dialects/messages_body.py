"""The bodies of ``/v1/messages`` and its token count, and the chat request that they mean.

Results of tools become messages of their own, as chat has them. Without `thinking` the model does
not think, as in Anthropic's API. Marks for the cache are hints: the prefix cache needs none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from metainfer.core.errors import RequestError
from metainfer.server.bodies import Rules, missing, supported, unsupported
from metainfer.server.dialects.names import Names
from metainfer.server.schemas import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    ChatRequest,
    Count,
    Label,
    Salt,
    Stop,
    Temperature,
    TopP,
    Variables,
)
from metainfer.text.calls import dumps
from metainfer.text.dialogue import SWITCHES

MAX_BLOCKS = 1024
MAX_STOPS = 256  # a ceiling; `bounds` has what is in force


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Text."""

    text: str


class ThinkingBlock(
    msgspec.Struct, tag_field="type", tag="thinking", kw_only=True, forbid_unknown_fields=True
):
    """Earlier reasoning. Nobody signs here: `signature` is not looked at."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(
    msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True, forbid_unknown_fields=True
):
    """A call in an earlier answer."""

    id: Label
    name: Label
    input: dict[str, Any]


class ToolResultBlock(
    msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True, forbid_unknown_fields=True
):
    """What a call gave. `is_error` is shown to the model as the word ``Error:`` before it."""

    tool_use_id: Label
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)] | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        marked = not self.is_error or text.lower().startswith("error")
        return text if marked else f"Error: {text}".rstrip()


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn. A last message of the assistant is continued."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(min_length=1, max_length=MAX_BLOCKS)]


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``enabled`` and ``adaptive`` switch reasoning on. `budget_tokens` is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized"] | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``any``: at least one call; ``tool``: one of `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer that fits `schema`."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How much to reason, and the form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesMetadata(msgspec.Struct, forbid_unknown_fields=True):
    """Who asks."""

    user_id: Label | None = None


Blocks = Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/messages/count_tokens``: what makes the prompt. Below the blank line: an
    extension."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Blocks | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    chat_template_kwargs: Variables | None = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/messages``. Below the blank line: extensions."""

    max_tokens: Count
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None

    cache_salt: Salt | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "container": (None,),
    "context_management": (None, {}, {"edits": []}, _KEEP_ALL),
    "diagnostics": (None, {}),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
    "user_profile_id": (None,),
    "workspace_id": (None,),
}
#: `parsed_output` is what Anthropic's clients add to an answer for their users.
_HINTS = ("cache_control", "parsed_output")
_BLOCK: dict[str, tuple[object, ...]] = {
    "caller": (None, {"type": "direct"}),
    "citations": (None, []),
    "toolset_name": (None,),
}
_TOOL: dict[str, tuple[object, ...]] = {
    "allowed_callers": (None, [], ["direct"]),
    "defer_loading": (None, False),
    "input_examples": (None, []),
    "type": (None, "custom"),
}
#: Blocks of other APIs' features: media, hosted tools, reasoning that only its maker can read.
_BLOCKS = (
    "advisor_tool_result", "bash_code_execution_tool_result", "browser_state",
    "code_execution_tool_result", "compaction", "container_upload", "document", "image",
    "mcp_tool_result", "mcp_tool_use", "redacted_thinking", "search_result", "server_tool_use",
    "text_editor_code_execution_tool_result", "tool_reference", "tool_search_tool_result",
    "web_fetch_tool_result", "web_search_tool_result",
)  # fmt: skip


def _shape(fields: dict[str, Any]) -> None:
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_message(f"messages[{i}]", m) for i, m in enumerate(messages)]
    if "system" in fields:
        fields["system"] = _blocks("system", fields["system"])
    tools = fields.get("tools")
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise unsupported(
                f"tools[{place}].type", kind, "Send tools with input_schema, and run them yourself."
            )


def _message(where: str, value: Any) -> Any:
    if not isinstance(value, dict) or "content" not in value:
        return value
    return value | {"content": _blocks(f"{where}.content", value["content"])}


def _blocks(where: str, value: Any, *, inner: bool = True) -> Any:
    if not isinstance(value, list):
        return value
    return [_block(f"{where}[{place}]", block, inner) for place, block in enumerate(value)]


def _block(where: str, value: Any, inner: bool) -> Any:
    """`inner`: whether this one may hold blocks, as a tool's result does."""
    if not isinstance(value, dict):
        return value
    if "type" not in value:
        raise missing(f"{where}.type")
    if value["type"] in _BLOCKS:
        raise unsupported(
            f"{where}.type", value["type"], "Send text, thinking, tool_use and tool_result blocks."
        )
    fields = supported(value, (), _BLOCK, f"{where}.")
    for name in _HINTS:
        fields.pop(name, None)
    if inner and "content" in fields:
        fields["content"] = _blocks(f"{where}.content", fields["content"], inner=False)
    return fields


RULES = Rules(_UNSUPPORTED, ("cache_control",), _shape)

_NAMES = {
    r"(?<=\])\.function\.parameters\b": ".input_schema",
    r"(?<=\])\.function(?=\.)": "",
    r"\bresponse_format\.json_schema\b": "output_config.format",
    r"\bresponse_format\b": "output_config.format",
    r"\breasoning_effort\b": "output_config.effort",
    r"\btool_call_id\b": "tool_use_id",
    r"\btool_calls\b": "tool_use",
    r"\bstop\b(?=:|\[|$)": "stop_sequences",
}


def chat_of(body: CountTokensRequest) -> tuple[ChatRequest, Names]:
    """The chat request that `body` means, and how to name its fields to the client.

    Raises:
        RequestError: 400 for blocks where their role has none, a tool without a name or schema.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if body.system:
        system = body.system
        shown = system if isinstance(system, str) else _parts(system)
        messages.append({"role": "system", "content": shown})
        places.append("system")
    for number, message in enumerate(body.messages):
        for place, made in _turns(f"messages[{number}]", message):
            messages.append(made)
            places.append(place)
    if "tool_calls" in messages[-1]:
        raise RequestError(
            f"{places[-1]} ends the messages with a tool_use block.",
            "Send its tool_result after it.",
            param=places[-1],
        )
    names = Names(_NAMES, places)
    choice = body.tool_choice
    config = body.output_config
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "chat_template_kwargs": _variables(body),
        "continue_final_message": body.messages[-1].role == "assistant" or None,
    }
    if choice is not None and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if config is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            wrapper = {"schema": config.format.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": wrapper}
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "user": None if body.metadata is None else body.metadata.user_id,
            "cache_salt": body.cache_salt,
            "priority": body.priority,
        }
    return names.chat_request(fields), names


def _turns(where: str, message: InputMessage) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, chat message): one, or one more for each result of a tool."""
    content = message.content
    if isinstance(content, str):
        yield where, {"role": message.role, "content": content}
    elif message.role == "assistant":
        yield where, _answer(where, content)
    else:
        texts: list[TextBlock] = []
        for place, block in enumerate(content):
            if isinstance(block, TextBlock):
                texts.append(block)
                continue
            if not isinstance(block, ToolResultBlock) or message.role != "user":
                raise _misplaced(f"{where}.content[{place}]", block, message.role)
            if texts:
                yield where, {"role": "user", "content": _parts(texts)}
                texts = []
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
            yield f"{where}.content[{place}]", result
        if texts:
            yield where, {"role": message.role, "content": _parts(texts)}


def _answer(where: str, content: list[Block]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _misplaced(f"{where}.content[{place}]", block, "assistant")
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        answer["reasoning_content"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _misplaced(where: str, block: Block, role: str) -> RequestError:
    kind = block.__struct_config__.tag
    return RequestError(
        f"{where} is a {kind} block in a message of the {role}.",
        "tool_result belongs to the user, thinking and tool_use to the assistant.",
        param=f"{where}.type",
    )


def _parts(blocks: list[TextBlock]) -> str | list[dict[str, str]]:
    if len(blocks) == 1:
        return blocks[0].text
    return [{"type": "text", "text": block.text} for block in blocks] or ""


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    fields = supported(tool, (), _TOOL, f"{where}.")
    if "input_schema" not in fields:
        raise missing(f"{where}.input_schema")
    function = {
        "parameters" if name == "input_schema" else name: value
        for name, value in fields.items()
        if name not in ("cache_control", "eager_input_streaming", "type")
    }
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise missing("tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _variables(body: CountTokensRequest) -> dict[str, Any]:
    """Template variables, with the family's switch for thinking; an effort alone leaves that to
    the model."""
    variables = dict(body.chat_template_kwargs or {})
    asked = body.output_config is not None and body.output_config.effort is not None
    if body.thinking is not None:
        variables["thinking"] = body.thinking.type != "disabled"
    elif not asked and not any(name in variables for name in SWITCHES):
        variables["thinking"] = False
    return variables
