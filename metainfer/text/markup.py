"""How a family marks reasoning and tool calls in what it writes: one row per family, plain data.

A row names the tags of reasoning and the form of calls; `AnswerParser` is the one automaton that
reads all rows. Forms: ``dsml`` (DeepSeek V3.2, V4, V4.1) and ``json`` (Hermes, Qwen 2.5 and 3).
Sources: `encoding_dsv4.py` of the DeepSeek-V4 checkpoints and their converter `deepseek-recipe`;
the chat templates of Qwen3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Opening(StrEnum):
    """Where the prompt leaves the model: what its first token continues."""

    REASONING = "reasoning"  # the prompt ends in an open reasoning tag
    CONTENT = "content"  # reasoning is closed or the model has none
    EITHER = "either"  # the model itself may open reasoning


@dataclass(frozen=True, slots=True)
class CallTags:
    """`form` picks the reader, and the builder of what is enforced (`call_forms`). ``dsml``: `open`
    is the token inside every tag, `block` the name of the outer one. ``json``: `open` and `close`
    stand around one JSON object with ``name`` and ``arguments``."""

    form: Literal["dsml", "json"]
    open: str
    close: str = ""
    block: str = ""


@dataclass(frozen=True, slots=True)
class Markup:
    """One family. `think` is (open, close), or None when it does not mark reasoning."""

    name: str
    think: tuple[str, str] | None = None
    calls: CallTags | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are one token each in the family's own tokenizers."""
        calls = () if self.calls is None else (self.calls.open, self.calls.close)
        return tuple(text for text in (*(self.think or ()), *calls) if text)


_THINK = ("<think>", "</think>")
_TOOL_CALL = CallTags("json", "<tool_call>", "</tool_call>")

PLAIN = Markup("plain")
DEEPSEEK = Markup("deepseek-dsml", _THINK, CallTags("dsml", "｜DSML｜", block="tool_calls"))
HERMES = Markup("hermes", None, _TOOL_CALL)
QWEN3 = Markup("qwen3", _THINK, _TOOL_CALL)
THINK = Markup("think", _THINK)

#: A call form that we do not read; a template that teaches it must not be taken for Hermes.
_OTHER_FORMS = ("<function=", "<arg_key>", "<|python_tag|>", "[TOOL_CALLS]", "<|channel|>")


def markup_of_template(template: str | None) -> Markup:
    """The row that a Jinja chat template teaches its model, by the tags it writes itself."""
    text = template or ""
    think = all(tag in text for tag in _THINK)
    calls = all(tag in text for tag in (_TOOL_CALL.open, _TOOL_CALL.close))
    calls = calls and not any(tag in text for tag in _OTHER_FORMS)
    if calls:
        return QWEN3 if think else HERMES
    return THINK if think else PLAIN
