"""A conversation as a request gives it, and the formats that make prompt ids of it.

`PromptFormat` is the seam: `JinjaFormat` renders a publisher's template, `DeepseekV4Format`
(`deepseek_v4.py`) writes what that family's encoder writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from metainfer.core.errors import RequestError
from metainfer.text.calls import loads
from metainfer.text.chat import ChatTemplate
from metainfer.text.markup import Markup, Opening, markup_of_template
from metainfer.text.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("thinking", "enable_thinking")  # names of the thinking switch among template variables

#: Marks the end of an answer that goes on, so that the template's own text is cut off after it.
_HERE = "\ufdef goes on here \ufdef"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call in an earlier answer; `arguments` is the text that the client sent."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `parts` are its texts; `call_id` names the call that a tool's turn answers."""

    role: str
    parts: tuple[str, ...] = ()
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[ToolUse, ...] = ()
    call_id: str | None = None

    @property
    def text(self) -> str:
        """All parts, joined without a separator."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What to make a prompt of. `tools` are function objects exactly as sent. `thinking` and
    `effort` None: the format's default. `variables` go to a Jinja template."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool | None = None
    effort: str | None = None
    open_answer: bool = True  # end with the header of the next answer
    continue_last: bool = False  # go on inside the last answer instead
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids, and where they leave the model. `continued`: it goes on inside an answer's text."""

    ids: list[int]
    opening: Opening
    continued: bool = False


class PromptFormat(Protocol):
    """How one model's prompts are written and its answers read."""

    @property
    def markup(self) -> Markup:
        """The row by which answers are parsed."""
        ...

    def encode(self, conversation: Conversation) -> Prompt:
        """The prompt. Raises `RequestError` for what the format cannot say."""
        ...

    def describe(self) -> dict[str, Any]:
        """What ``/v1/models`` shows of it."""
        ...


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """A plain conversation from ``{"role", "content"}`` messages of text."""
    turns = tuple(Turn(str(item["role"]), (str(item["content"]),)) for item in messages)
    return Conversation(turns=turns)


class JinjaFormat:
    """A chat template over a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.template = template
        self._tokenizer = tokenizer
        names = template.names
        name = "tool_use" if "tool_use" in names else "default"
        self._source = template.source(name) or template.source(names[0] if names else "") or ""
        self.markup = markup_of_template(self._source)

    def describe(self) -> dict[str, Any]:
        """The kind of prompt and the row for answers."""
        kind = "template" if self.template.names else None
        return {"prompt": kind, "answer": self.markup.name, "tools": self.markup.calls is not None}

    def encode(self, conversation: Conversation) -> Prompt:
        """The rendered template, read with special tokens."""
        variables = {**self._switches(conversation), **conversation.variables}
        messages = list(map(_message, conversation.turns))
        if conversation.continue_last:
            messages[-1]["content"] += _HERE
        text = self.template.render(
            messages,
            tools=[{"type": "function", "function": tool} for tool in conversation.tools],
            add_generation_prompt=conversation.open_answer and not conversation.continue_last,
            **variables,
        )
        if conversation.continue_last:
            text = _up_to_mark(text)
        ids = self._tokenizer.encode(text, add_special=False)
        opening = Opening.CONTENT if conversation.continue_last else self._opening(text)
        return Prompt(ids, opening, conversation.continue_last)

    def _opening(self, text: str) -> Opening:
        if self.markup.think is None:
            return Opening.CONTENT
        tail = text.rstrip()
        for tag, opening in zip(
            self.markup.think, (Opening.REASONING, Opening.CONTENT), strict=True
        ):
            if tail.endswith(tag):
                return opening
        return Opening.EITHER

    def _switches(self, conversation: Conversation) -> dict[str, Any]:
        """Variables by which the template is told of `thinking` and `effort`."""
        found: dict[str, Any] = {}
        thinking, effort = conversation.thinking, conversation.effort
        knows = [name for name in SWITCHES if name in self._source]
        if effort is not None and "reasoning_effort" in self._source:
            found["reasoning_effort"] = effort
        elif effort == "none" and knows:
            thinking = False
        elif effort is not None:
            raise RequestError(
                f"This model's chat template knows no reasoning_effort {effort!r}.",
                "Leave it out, or set the template's own variables in chat_template_kwargs.",
                param="reasoning_effort",
                code="unsupported_parameter",
            )
        if thinking is not None:
            found |= dict.fromkeys(knows or SWITCHES[1:], thinking)
        return found


def _message(turn: Turn) -> dict[str, Any]:
    """A turn as templates read it: both reasoning names, arguments as objects."""
    shown: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.name is not None:
        shown["name"] = turn.name
    if turn.reasoning:
        shown |= {"reasoning_content": turn.reasoning, "reasoning": turn.reasoning}
    if turn.calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call)},
            }
            for call in turn.calls
        ]
    if turn.call_id is not None:
        shown["tool_call_id"] = turn.call_id
    return shown


def _arguments(call: ToolUse) -> Any:
    try:
        return loads(call.arguments)
    except ValueError:
        return call.arguments


def _up_to_mark(text: str) -> str:
    place = text.rfind(_HERE)
    if place >= 0:
        return text[:place]
    raise RequestError(
        "The chat template does not show the last message as it was sent.",
        "Leave out continue_final_message.",
        param="continue_final_message",
        code="chat_template_error",
    )
