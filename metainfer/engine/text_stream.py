"""Text of one request: token ids in, text deltas, stop strings, log-probabilities, usage out.

Server and command line share it. The engine knows no text, so a stop string ends the request
here: `TextStream.push` reports ``stop`` and the caller leaves the output iterator, which cancels
the rest in the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from metainfer.core.errors import InternalError, RequestError
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.core.step import OUT_OF_MEMORY, RequestOutput, TokenLogprobs
from metainfer.text.answer import Piece, Run, text_of
from metainfer.text.calls import Call

if TYPE_CHECKING:
    from metainfer.text.answer import Answer, AnswerParser
    from metainfer.text.markers import MarkerTokens
    from metainfer.text.stops import StopMatcher
    from metainfer.text.tokenizer import Tokenizer


TOOL_CALLS = "tool_calls"


class Delta(msgspec.Struct):
    """What one engine output adds to a choice. `finish` is ``stop``, ``length`` or
    ``tool_calls`` at the end.

    `starts[i]` is the character offset at which `tokens[i]` begins in the generated text.
    `pieces` are in the order in which the model wrote them; where the answer is not read in
    channels all of it is content.
    """

    pieces: list[Piece] = []
    tokens: tuple[int, ...] = ()
    starts: list[int] = []
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None

    @property
    def text(self) -> str:
        """What is added to the content."""
        return text_of(self.pieces, "content")

    @property
    def reasoning(self) -> str:
        """What is added to the reasoning."""
        return text_of(self.pieces, "reasoning")

    @property
    def calls(self) -> list[Call]:
        """Calls that became whole."""
        return self.channels[2]

    @property
    def channels(self) -> tuple[str, str, list[Call]]:
        """Content, reasoning and calls in one pass: servers ask for each token."""
        text = reasoning = ""
        calls = []
        for piece in self.pieces:
            if isinstance(piece, Call):
                calls.append(piece)
            elif piece.channel == "content":
                text += piece.text
            else:
                reasoning += piece.text
        return text, reasoning, calls


class TextStream:
    """State of one choice. Counts tokens, finds stop strings, keeps text and tokens aligned.

    A stop string is looked for once `min_tokens` tokens are out; the text ends before it. Tokens
    after the one that completed it are dropped, though the engine may have sent them together.
    With a parser the text comes in channels: content in `Delta.text`, reasoning, calls.
    """

    __slots__ = (
        "_called",
        "_detokenizer",
        "_finder",
        "_min_tokens",
        "_offset",
        "_one_call",
        "_parser",
        "_symbols",
        "_want_starts",
        "cached_tokens",
        "completion_tokens",
        "finish",
        "reasoning_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        params: SamplingParams,
        parser: AnswerParser | None = None,
        markers: MarkerTokens | None = None,
        one_call: bool = False,
    ) -> None:
        """`markers`: the marker tokens that `parser` knows by their symbols. `one_call`: the
        answer ends with its first call. `RequestError` for an empty, over-long or surplus stop
        string."""
        from metainfer.text.detokenize import IncrementalDetokenizer
        from metainfer.text.markers import MarkedDetokenizer

        self._detokenizer = (
            IncrementalDetokenizer(tokenizer)
            if markers is None
            else MarkedDetokenizer(tokenizer, markers)
        )
        self._parser = parser
        self._one_call = one_call
        self._called = False
        self.reasoning_tokens = 0
        self._symbols = {} if markers is None else markers.symbols
        self._finder = _finder(stops, self._symbols)
        self._min_tokens = params.min_tokens
        self._want_starts = params.logprobs is not None
        self._offset = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish: str | None = None

    def push(self, output: RequestOutput) -> Delta:
        """The delta of `output`.

        Raises:
            RequestError: the engine ended this request with an error (500) or cancelled it (503).
        """
        if output.index != self.completion_tokens:
            raise InternalError(
                f"output at token {output.index}, expected {self.completion_tokens}"
            )
        if output.finish in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise _failure(output)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        delta = Delta(
            tokens=output.tokens,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
        )
        if self._finder is None and self._parser is None and not self._want_starts:
            _say(delta, self._detokenizer.push(output.tokens) if output.tokens else "")
            self.completion_tokens += len(output.tokens)
        else:
            self._push_each(output.tokens, delta)
        ended = self.finish is not None
        if not ended and output.finish is not None:
            self._write(delta, self._tail())
            self.finish = self.finish or output.finish.value
        if self._parser is not None and self.finish is not None:
            cut = ended or output.finish is not FinishReason.STOP
            self._add(delta, self._parser.finish(cut=cut))
            if self._called and self.finish == FinishReason.STOP.value:
                self.finish = TOOL_CALLS
        delta.finish = self.finish
        return delta

    def _push_each(self, tokens: tuple[int, ...], delta: Delta) -> None:
        starts = []
        for count, token in enumerate(tokens, start=1):
            starts.append(self._offset)
            text = self._detokenizer.push((token,))
            self._offset += len(text)
            self.completion_tokens += 1
            self._write(delta, self._stop(text), tokens=1)
            if self.finish is not None:
                delta.tokens = tokens[:count]
                delta.logprobs = delta.logprobs[:count]
                break
        delta.starts = starts

    def _write(self, delta: Delta, text: str, tokens: int = 0) -> None:
        """Add `text`, which `tokens` tokens spelled, to its channels."""
        if self._parser is None:
            _say(delta, text)
            return
        reasoned = self._parser.in_reasoning
        self._add(delta, self._parser.push(text))
        if reasoned or self._parser.in_reasoning:  # the markers count with what they enclose
            self.reasoning_tokens += tokens
        if self._called and self._one_call and self.finish is None:
            self.finish = FinishReason.STOP.value

    def _add(self, delta: Delta, answer: Answer) -> None:
        for piece in answer.pieces:
            if isinstance(piece, Call):
                if self._one_call and self._called:
                    continue
                self._called = True
            delta.pieces.append(piece)

    @property
    def notes(self) -> tuple[str, ...]:
        """Stable words about what in the answer was not as it should be."""
        return () if self._parser is None else tuple(self._parser.notes)

    @property
    def stop_string(self) -> str | None:
        """The stop string at which the text ended, as the client spelled it."""
        from metainfer.text.scan import plain

        matched = None if self._finder is None else self._finder.matched
        return None if matched is None else plain(matched, self._symbols)

    def _stop(self, text: str) -> str:
        if self._finder is None or self.completion_tokens < self._min_tokens:
            return text
        text, found = self._finder.push(text)
        if found:
            self.finish = FinishReason.STOP.value
        return text

    def _tail(self) -> str:
        text = self._detokenizer.flush()
        if self._finder is None:
            return text
        text, found = self._finder.push(text)
        if found:
            self.finish = FinishReason.STOP.value
            return text
        return text + self._finder.flush()


def _say(delta: Delta, text: str) -> None:
    if text:
        delta.pieces.append(Run("content", text))


def _finder(stops: Sequence[str], symbols: Mapping[str, str]) -> StopMatcher | None:
    """A matcher of `stops`; one that spells marker tokens is found in both spellings."""
    from metainfer.text.scan import substitute
    from metainfer.text.stops import MAX_STOPS, StopMatcher

    if not stops:
        return None
    StopMatcher(stops)  # its bounds are those of what the client sent
    forms = list(dict.fromkeys([*stops, *(substitute(stop, symbols) for stop in stops)]))
    return StopMatcher(forms, max_stops=2 * MAX_STOPS)


def _failure(output: RequestOutput) -> RequestError:
    if output.finish is FinishReason.CANCELLED:
        return RequestError(
            "The request was cancelled by the engine.",
            "Send it again.",
            status=503,
            error_type="server_error",
            code="cancelled",
        )
    no_memory = output.code == OUT_OF_MEMORY
    return RequestError(
        f"The engine could not finish this request: {output.error or 'unknown error'}.",
        "Send a shorter one, or send it again later." if no_memory else "",
        status=503 if no_memory else 500,
        error_type="server_error",
        code=output.code or "engine_error",
        retry_after_s=5.0 if no_memory else None,
    )


def expand(request: Request, n: int) -> list[Request]:
    """`n` engine requests for one prompt: ids ``<id>-<i>``, seeds `seed + i` (wrapped to int64)."""
    requests = []
    for index in range(n):
        params = request.params
        if index and params.seed is not None:
            seed = (params.seed + index + 2**63) % 2**64 - 2**63
            params = msgspec.structs.replace(params, seed=seed)
        requests.append(
            msgspec.structs.replace(
                request, request_id=f"{request.request_id}-{index}", params=params
            )
        )
    return requests


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int
) -> list[dict[str, Any]]:
    """OpenAI's chat form: one item per token with its `top` most likely alternatives."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        text = raw.decode("utf-8", errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    return [
        item(entry.token, entry.logprob)
        | {"top_logprobs": [item(token, value) for token, value in entry.top[:top]]}
        for entry in entries
    ]


class LegacyLogprobs(msgspec.Struct):
    """The block of ``/v1/completions``: parallel lists over tokens."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = []

    def add(
        self,
        tokenizer: Tokenizer,
        entry: TokenLogprobs | None,
        *,
        token: int,
        offset: int,
        top: int,
    ) -> None:
        """One token. `entry` None: its log-probability is unknown (the first of a prompt)."""
        self.text_offset.append(offset)
        self.tokens.append(tokenizer.token_text(token))
        self.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        if self.top_logprobs is None:
            return
        if entry is None:
            self.top_logprobs.append(None)
            return
        alternatives: dict[str, float] = {}
        for other, value in entry.top[:top]:
            # Two ids may share a text; the likelier one comes first and stays.
            alternatives.setdefault(tokenizer.token_text(other), _finite(value))
        self.top_logprobs.append(alternatives)

    def extend(self, other: LegacyLogprobs) -> None:
        """Append the tokens of `other`."""
        self.text_offset += other.text_offset
        self.token_logprobs += other.token_logprobs
        self.tokens += other.tokens
        if self.top_logprobs is not None and other.top_logprobs is not None:
            self.top_logprobs += other.top_logprobs


def _finite(logprob: float) -> float:
    # JSON has no -inf; OpenAI writes -9999 for a token that was never possible.
    return logprob if logprob > -9999.0 else -9999.0
