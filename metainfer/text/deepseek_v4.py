"""DeepSeek-V4's prompts, laid out as the publisher's encoder and converter lay them out.

``BOS [effort] system`` then turns ``<User>text<Assistant>(<think>|</think>)answer EOS`` without
newlines around markers. All system texts are folded to the front. Results of tools become one
user turn, in the order of the calls. Earlier reasoning is kept only in conversations with tools.
Markers are written as tokens; every other text, the fixed pieces between their markers
included, is read without the added vocabulary, so no message can spell a marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from metainfer.core.errors import ModelError, RequestError
from metainfer.text.calls import dumps, loads
from metainfer.text.dialogue import Conversation, Prompt, ToolUse, Turn
from metainfer.text.markup import DEEPSEEK, Markup, Opening
from metainfer.text.tokenizer import Tokenizer
from metainfer.text.wire_pieces import WirePieces

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
REMINDER = "<｜latest_reminder｜>"
MARKERS = (BOS, EOS, PAD, USER, ASSISTANT, THINK, END_THINK, DSML, REMINDER)

_LEVELS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "high"}
_IN_PIECES = re.compile(f"({DSML}|{THINK}|{END_THINK})")


class _Writer:
    """A prompt under way: runs of plain text between markers."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, bool]] = []  # (text, whether it is a marker)

    def mark(self, *markers: str) -> None:
        self.runs += [(marker, True) for marker in markers]

    def text(self, text: str) -> None:
        """Plain text; joins the run before it, as the tokenizer must see it whole."""
        if not text:
            return
        if self.runs and not self.runs[-1][1]:
            text = self.runs.pop()[0] + text
        self.runs.append((text, False))

    def piece(self, text: str) -> None:
        """Text of the format's own, whose markers are tokens."""
        for place, part in enumerate(_IN_PIECES.split(text)):
            if place % 2:
                self.mark(part)
            else:
                self.text(part)


class DeepseekV4Format:
    """Prompts of DeepSeek-V4 in ids of `tokenizer`."""

    markup: Markup = DEEPSEEK

    def __init__(self, tokenizer: Tokenizer, pieces: WirePieces) -> None:
        """`ModelError` when the vocabulary lacks a marker."""
        self._tokenizer = tokenizer
        self.pieces = pieces
        self._ids = {}
        for marker in MARKERS:
            found = tokenizer.token_id(marker)
            if found is None and marker not in (PAD, REMINDER):
                raise ModelError(
                    f"The tokenizer has no token {marker!r}, which DeepSeek-V4's prompts need.",
                    "Download the model's tokenizer.json again.",
                    code="bad_tokenizer",
                )
            if found is not None:
                self._ids[marker] = found

    def describe(self) -> dict[str, Any]:
        """The kind of prompt, where its fixed pieces came from, efforts that can be asked for."""
        return {
            "prompt": "deepseek-v4",
            "answer": self.markup.name,
            "tools": bool(self.pieces.tools_head),
            "pieces": self.pieces.source,
            "pieces_refused": list(self.pieces.reasons),
            "efforts": ["none", *self.pieces.efforts],
            "default_effort": self.pieces.default_effort,
        }

    def encode(self, conversation: Conversation) -> Prompt:
        """The prompt; markers as their ids, everything else as plain text."""
        runs, opening, continued = self.render(conversation)
        ids: list[int] = []
        for text, is_marker in runs:
            if is_marker:
                ids.append(self._ids[text])
            else:
                ids += self._tokenizer.encode_literal(text)
        return Prompt(ids, opening, continued)

    def render(self, conversation: Conversation) -> tuple[list[tuple[str, bool]], Opening, bool]:
        """(runs of (text, whether it is a marker), where the prompt ends, whether inside text).

        Raises:
            RequestError: a fixed piece is asked for that no source has; unknown variables.
        """
        thinking, effort = _mode(conversation)
        out = _Writer()
        out.mark(BOS)
        if thinking:
            out.piece(self.pieces.effort(effort))
        turns, system = _fold(conversation.turns)
        out.text(system)
        if conversation.tools:
            head, tail = self.pieces.tools()
            out.text("\n\n")
            out.piece(head)
            out.text("\n".join(map(dumps, conversation.tools)))
            out.piece(tail)
        last = len(turns) - 1
        keep = bool(conversation.tools)
        opening, inside = Opening.CONTENT, False
        for place, turn in enumerate(turns):
            if turn.role == "assistant":
                goes_on = conversation.continue_last and place == last
                opening, inside = _answer(
                    out, turn, keep=keep or goes_on, goes_on=goes_on, thinking=thinking
                )
            else:
                out.mark(REMINDER if turn.role == "latest_reminder" else USER)
                out.text(_joined(turn))
        if conversation.continue_last:
            return out.runs, opening, inside
        if conversation.open_answer:
            out.mark(ASSISTANT, THINK if thinking else END_THINK)
            return out.runs, Opening.REASONING if thinking else Opening.CONTENT, False
        return out.runs, Opening.EITHER, False


def _mode(conversation: Conversation) -> tuple[bool, str | None]:
    """(whether to think, effort as the pieces name it)."""
    effort = conversation.effort
    unknown = sorted(conversation.variables)
    if unknown:
        raise RequestError(
            f"DeepSeek-V4's prompt format knows no variable {unknown[0][:100]!r}.",
            "It takes thinking (or enable_thinking) and reasoning_effort.",
            param="chat_template_kwargs",
        )
    thinking = conversation.thinking is not False and effort != "none"
    if effort == "none" and conversation.thinking:
        raise RequestError(
            "reasoning_effort 'none' contradicts thinking.", "Leave one out.",
            param="reasoning_effort",
        )  # fmt: skip
    return thinking, None if effort is None else _LEVELS.get(effort, effort)


def _fold(turns: tuple[Turn, ...]) -> tuple[list[Turn], str]:
    """(turns with results of tools and neighbouring user texts merged, all system texts).

    Results are sorted by the order of their calls; a user's text after them joins their turn.
    """
    merged: list[Turn] = []
    system = []
    order: dict[str | None, int] = {}
    spoken = [turn for turn in turns if turn.role not in ("system", "developer")]
    system = [_joined(turn) for turn in turns if turn.role in ("system", "developer")]
    for role, group in groupby(spoken, key=lambda turn: turn.role):
        together = list(group)
        if role == "assistant":
            for turn in together:
                if turn.calls:
                    order = {call.id: place for place, call in enumerate(turn.calls)}
            merged += together
        elif role == "tool":
            together.sort(key=lambda turn: order.get(turn.call_id, len(order)))
            results = tuple(f"<tool_result>{_joined(turn)}</tool_result>" for turn in together)
            merged.append(Turn("tool", results))
        elif role == "user":
            before = merged.pop().parts if merged and merged[-1].role == "tool" else ()
            merged.append(Turn("user", (*before, _glued(map(_joined, together)))))
        else:
            merged += together
    return merged, _glued(system)


def _glued(texts: Iterable[str]) -> str:
    """The texts that are not empty, with a blank line between them."""
    return "\n\n".join(filter(None, texts))


def _joined(turn: Turn) -> str:
    return "\n\n".join(turn.parts)


def _answer(
    out: _Writer, turn: Turn, *, keep: bool, goes_on: bool, thinking: bool
) -> tuple[Opening, bool]:
    """Write an earlier answer; (channel it ends in, whether inside its text) if it goes on."""
    text = _joined(turn)
    reasoning = turn.reasoning
    if reasoning is None and thinking:
        reasoning = ""  # as the converter fills it
    out.mark(ASSISTANT)
    if keep and reasoning is not None:
        out.mark(THINK)
        out.text(reasoning)
        if goes_on and thinking and not text and not turn.calls:
            return Opening.REASONING, bool(reasoning)
    out.mark(END_THINK)
    out.text(text)
    if turn.calls:
        _write_calls(out, turn.calls)
    if not goes_on:
        out.mark(EOS)
    return Opening.CONTENT, bool(text)


def _write_calls(out: _Writer, calls: Sequence[ToolUse]) -> None:
    def tag(before: str, after: str) -> None:
        out.text(before)
        out.mark(DSML)
        out.text(after)

    out.text("\n\n")
    tag("<", "tool_calls>\n")
    for call in calls:
        tag("<", f'invoke name="{call.name}">\n')
        for name, value in _arguments(call).items():
            is_text = isinstance(value, str)
            tag("<", f'parameter name="{name}" string="{"true" if is_text else "false"}">')
            out.text(value if is_text else dumps(value))
            tag("</", "parameter>\n")
        tag("</", "invoke>\n")
    tag("</", "tool_calls>")


def _arguments(call: ToolUse) -> dict[str, Any]:
    """The call's arguments; what is no JSON object is passed as one text, as the encoder does."""
    try:
        value = loads(call.arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": call.arguments}
