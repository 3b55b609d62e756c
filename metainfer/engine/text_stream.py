"""Text of one request: token ids in, text deltas, stop strings, log-probabilities, usage out.

Server and command line share it. The engine knows no text, so a stop string ends the request
here: `TextStream.push` reports ``stop`` and the caller leaves the output iterator, which cancels
the rest in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from metainfer.core.errors import InternalError, RequestError
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.core.step import RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from metainfer.text.chat import ChatTemplate
    from metainfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextTools:
    """A model's tokenizer and chat template; the template may be empty (`render` then refuses)."""

    tokenizer: Tokenizer
    template: ChatTemplate


def load_text(reference: str, vocab_size: int) -> TextTools:
    """The text side of a model reference that the engine has already loaded.

    Random models have no tokenizer of their own and get `byte_text`.

    Raises:
        ModelError: the tokenizer or template is missing or malformed.
    """
    from metainfer.formats.source import resolve
    from metainfer.text.chat import ChatTemplate
    from metainfer.text.tokenizer import Tokenizer

    source = resolve(reference, fetch=False)
    if source.path is None:
        return byte_text(vocab_size)
    if source.kind == "gguf":
        tokenizer = Tokenizer.from_gguf_metadata(source.gguf_metadata)
        template = ChatTemplate.from_gguf_metadata(source.gguf_metadata, tokenizer.special_tokens)
    else:
        tokenizer = Tokenizer.from_folder(source.path)
        template = ChatTemplate.from_folder(source.path, tokenizer.special_tokens)
    return TextTools(tokenizer, template)


_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_text(vocab_size: int) -> TextTools:
    """Text of a model without a tokenizer: ids 0-255 are bytes, id `i` above reads ``<i>``."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from metainfer.text.chat import ChatTemplate
    from metainfer.text.tokenizer import Tokenizer

    letters = _byte_letters()[:vocab_size]
    vocab = {letter: value for value, letter in enumerate(letters)}
    vocab |= {f"<{value}>": value for value in range(len(letters), vocab_size)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, add_bos=False, vocab_size=vocab_size)
    return TextTools(tokenizer, ChatTemplate(_PLAIN_TEMPLATE))


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte value (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for value in range(256):
        if value in printable:
            letters.append(chr(value))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


class Delta(msgspec.Struct):
    """What one engine output adds to a choice. `finish` is ``stop`` or ``length`` at the end.

    `starts[i]` is the character offset at which `tokens[i]` begins in the generated text.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    starts: list[int] = []
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None


class TextStream:
    """State of one choice. Counts tokens, finds stop strings, keeps text and tokens aligned.

    A stop string is looked for once `min_tokens` tokens are out; the text ends before it. Tokens
    after the one that completed it are dropped, though the engine may have sent them together.
    """

    __slots__ = (
        "_detokenizer",
        "_finder",
        "_min_tokens",
        "_offset",
        "_want_starts",
        "cached_tokens",
        "completion_tokens",
        "finish",
    )

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, params: SamplingParams
    ) -> None:
        """`RequestError` for an empty, over-long or surplus stop string."""
        from metainfer.text.detokenize import IncrementalDetokenizer
        from metainfer.text.stops import StopMatcher

        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._finder = StopMatcher(stops) if stops else None
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
        if self._finder is None and not self._want_starts:
            delta.text = self._detokenizer.push(output.tokens) if output.tokens else ""
            self.completion_tokens += len(output.tokens)
        else:
            self._push_each(output.tokens, delta)
        if self.finish is None and output.finish is not None:
            delta.text += self._tail()
            self.finish = self.finish or output.finish.value
        delta.finish = self.finish
        return delta

    def _push_each(self, tokens: tuple[int, ...], delta: Delta) -> None:
        parts = []
        starts = []
        for count, token in enumerate(tokens, start=1):
            starts.append(self._offset)
            text = self._detokenizer.push((token,))
            self._offset += len(text)
            self.completion_tokens += 1
            parts.append(self._stop(text))
            if self.finish is not None:
                delta.tokens = tokens[:count]
                delta.logprobs = delta.logprobs[:count]
                break
        delta.text = "".join(parts)
        delta.starts = starts

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


def _failure(output: RequestOutput) -> RequestError:
    if output.finish is FinishReason.CANCELLED:
        return RequestError(
            "The request was cancelled by the engine.",
            "Send it again.",
            status=503,
            error_type="server_error",
            code="cancelled",
        )
    return RequestError(
        f"The engine could not finish this request: {output.error or 'unknown error'}.",
        status=500,
        error_type="server_error",
        code="engine_error",
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
