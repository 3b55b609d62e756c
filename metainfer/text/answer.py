"""Reasoning, content and tool calls out of a stream of generated text.

One automaton for every family (`markup.py`). Rules, the same for every cut of the text:

- Newlines next to a marker are framing: those that lead a channel and those before a marker are
  dropped, up to `MAX_GAP` of them.
- A closing tag or a call ends reasoning. An opening tag starts it, wherever it stands.
- A call is handed out when it is whole and its arguments are one JSON object, never in part, so
  no client sees arguments that the model did not finish. Text around calls is content.
- Reasoning that is never closed stays reasoning. `notes` says so, and says what was dropped.
- Held back is only what may still become a marker, a bounded gap, or the call being read, which
  is given up beyond `MAX_CALL_CHARS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple

from metainfer.text.calls import Call, CallReader, DsmlReader, JsonReader
from metainfer.text.markup import Markup, Opening
from metainfer.text.scan import Buffer, plain, substitute

MAX_GAP = 8


Channel = Literal["reasoning", "content"]


class Run(NamedTuple):
    """Text of one channel."""

    channel: Channel
    text: str


Piece = Run | Call
"""A run of text, or one whole call."""


def text_of(pieces: Sequence[Piece], channel: Channel) -> str:
    """The text of `channel` in `pieces`."""
    text = ""
    for piece in pieces:  # one, nearly always
        if isinstance(piece, Run) and piece.channel == channel:
            text += piece.text
    return text


@dataclass(slots=True)
class Answer:
    """What a push adds, in the order in which the model wrote it."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        return text_of(self.pieces, "reasoning")

    @property
    def content(self) -> str:
        return text_of(self.pieces, "content")

    @property
    def calls(self) -> list[Call]:
        return [piece for piece in self.pieces if isinstance(piece, Call)]


class _State(Enum):
    UNDECIDED = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class AnswerParser:
    """State of one answer. `notes` collects stable words about what was not as it should be."""

    def __init__(
        self,
        markup: Markup,
        opening: Opening = Opening.EITHER,
        *,
        calls: Literal["read", "enforced", "drop", "text"] = "read",
        continued: bool = False,
        symbols: Mapping[str, str] | None = None,
    ) -> None:
        """`calls`: read them, cut them out and drop them, or take them for text. ``enforced``: a
        grammar sees to them, but not inside reasoning, so one there is text. `continued`: the
        answer goes on from text of the prompt, so its leading newlines are its own. `symbols`
        maps marker texts to the characters that stand for their tokens in pushed text
        (`markers.py`); empty for plain text."""
        self._symbols = dict(symbols or {})
        self.notes: list[str] = []
        self._buffer = Buffer()
        think = None if markup.think is None else tuple(map(self._marker, markup.think))
        if think is None:
            opening = Opening.CONTENT
        self._think = think
        self._reader: CallReader | None = None
        self._dropping = calls == "drop"
        if calls != "text" and markup.calls is not None:
            tags, marks, repeats = markup.calls, self._marker, calls == "enforced"
            if tags.form == "dsml":
                self._reader = DsmlReader(marks(tags.open), self.notes, repeats=repeats)
            else:
                self._reader = JsonReader(
                    marks(tags.open), marks(tags.close), self.notes, repeats=repeats
                )
        call_starts = () if self._reader is None else self._reader.starts
        self._needles = (*(think or ()), *call_starts)
        self._before_answer = calls == "enforced" and opening is not Opening.CONTENT
        self._state = {
            Opening.REASONING: _State.REASONING,
            Opening.CONTENT: _State.CONTENT,
            Opening.EITHER: _State.UNDECIDED,
        }[opening]
        self._fresh = not continued  # nothing of the channel is out yet
        self._gap = ""
        self._called = False
        self._after_call = False
        self._after = _State.CONTENT  # where a call leaves the stream
        self._answer = Answer()

    def _marker(self, text: str) -> str:
        return substitute(text, self._symbols)

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token is reasoning, as far as pushed text tells."""
        return self._state is _State.REASONING

    def push(self, text: str) -> Answer:
        """What `text` completes."""
        self._buffer.push(text)
        while self._step():
            pass
        return self._take()

    def finish(self, *, cut: bool = False) -> Answer:
        """The rest. `cut`: the answer was ended from outside (length, stop string)."""
        while self._state is _State.CALL:
            assert self._reader is not None
            rest = self._reader.finish(self._buffer, cut=cut)
            self._collect()
            self._leave_call()
            if rest is None:
                break
            self._buffer = Buffer()
            self._buffer.push(rest)
            while self._step():
                pass
        if self._state is _State.UNDECIDED:
            self._state = _State.CONTENT
        held = self._buffer.take()
        in_block = self._reader is not None and self._reader.in_block
        if cut and (in_block or len(held) > 2):  # most of a marker; a lone "<" may be text
            held = ""
        self._write(held)
        if not self._after_call:
            self._emit(self._gap)
        self._gap = ""
        if cut and in_block and not self._called:
            self._note("call_not_finished")
        if self._state is _State.REASONING and not cut:
            self._note("reasoning_not_closed")
        return self._take()

    def _take(self) -> Answer:
        answer, self._answer = self._answer, Answer()
        return answer

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _step(self) -> bool:
        """Move on by one marker or one run of text; False when more text is needed."""
        if self._state is _State.UNDECIDED:
            return self._decide()
        if self._state is _State.CALL:
            assert self._reader is not None
            done = self._reader.step(self._buffer)
            self._collect()
            if done:
                self._leave_call()
            return done
        needles = self._needles
        if self._before_answer and self._think is not None:
            needles = self._think
        text, needle = self._buffer.until(needles)
        self._write(text)
        if needle is None:
            return False
        self._enter(needle)
        return True

    def _decide(self) -> bool:
        """Before the first word: does the answer open with reasoning?"""
        assert self._think is not None
        seen = self._buffer.peek().lstrip()
        if not seen or (self._think[0] != seen and self._think[0].startswith(seen)):
            if len(self._buffer.peek()) <= MAX_GAP + len(self._think[0]):
                return False
        elif seen.startswith(self._think[0]):
            self._buffer.drop_space()
        else:
            self._before_answer = False
        self._state = _State.CONTENT
        return True

    def _enter(self, needle: str) -> None:
        """A marker was reached in reasoning or content."""
        if self._think is not None and needle in self._think:
            opens = needle == self._think[0]
            if opens == (self._state is _State.REASONING):
                # Twice the same: the tag is no text, and changes nothing.
                self._note("stray_reasoning_tag")
                return
            self._turn(_State.REASONING if opens else _State.CONTENT)
            return
        assert self._reader is not None
        self._after = _State.CONTENT
        if self._state is _State.REASONING:
            if self._reader.closes(needle):  # ends nothing that is open
                self._after = _State.REASONING
            else:
                self._note("call_in_reasoning")
        self._turn(_State.CALL)
        self._reader.begin(needle)

    def _turn(self, state: _State) -> None:
        self._gap = ""
        self._fresh = True
        self._after_call = False
        self._before_answer &= state is _State.REASONING
        self._state = state

    def _leave_call(self) -> None:
        self._turn(self._after)
        self._fresh = False  # newlines between calls are a gap, not the head of a channel
        self._after_call = True

    def _collect(self) -> None:
        assert self._reader is not None
        for call in self._reader.take():
            self._called = True
            if self._dropping:
                self._note("call_not_offered")
                continue
            name, arguments = plain(call.name, self._symbols), plain(call.arguments, self._symbols)
            self._answer.pieces.append(Call(name, arguments))

    def _write(self, text: str) -> None:
        """Text of the current channel: drop its head newlines, hold back its last ones."""
        if self._fresh:
            text = text.lstrip("\n")
            if not text:
                return
            self._fresh = False
        lead = ""
        if self._after_call:
            lead = text[: len(text) - len(text.lstrip())]
            text = text[len(lead) :]
            self._after_call = not text
        body = text.rstrip("\n")
        if body:
            self._emit(self._gap + lead + body)
            self._gap, lead = "", ""
        self._gap += lead + text[len(body) :]
        if len(self._gap) > MAX_GAP:
            self._emit(self._gap[:-MAX_GAP])
            self._gap = self._gap[-MAX_GAP:]

    def _emit(self, text: str) -> None:
        text = plain(text, self._symbols)
        channel: Channel = "reasoning" if self._state is _State.REASONING else "content"
        if text:
            self._answer.pieces.append(Run(channel, text))
