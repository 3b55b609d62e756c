"""The text side of a model reference: tokenizer, prompt format, reader of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from metainfer.core.errors import ModelError
from metainfer.core.request import SamplingParams
from metainfer.engine.text_stream import TextStream

if TYPE_CHECKING:
    from metainfer.text.dialogue import Prompt, PromptFormat
    from metainfer.text.markers import MarkerTokens
    from metainfer.text.tokenizer import Tokenizer

DEEPSEEK_V4 = "deepseek_v4"  # the model_type whose prompts no template describes


@dataclass(frozen=True)
class TextTools:
    """A model's tokenizer and how its prompts are written (a template may be missing: `encode`
    then refuses)."""

    tokenizer: Tokenizer
    format: PromptFormat

    @cached_property
    def markers(self) -> MarkerTokens:
        """Marker tokens of the format's answers in this tokenizer."""
        from metainfer.text.markers import MarkerTokens

        return MarkerTokens(self.format.markup, self.tokenizer)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """The prompt of a plain conversation; the answer's header ends it."""
        from metainfer.text.dialogue import conversation_of

        return self.format.encode(conversation_of(messages))

    def answer_stream(
        self,
        stops: Sequence[str],
        params: SamplingParams,
        prompt: Prompt,
        *,
        calls: Literal["read", "enforced", "drop", "text"],
        one_call: bool = False,
    ) -> TextStream:
        """The text of an answer to `prompt`, in channels; `calls` as `AnswerParser` takes it."""
        from metainfer.text.answer import AnswerParser
        from metainfer.text.markup import PLAIN

        markup = self.format.markup
        if markup is PLAIN:
            return TextStream(self.tokenizer, stops, params=params)
        parser = AnswerParser(
            markup,
            prompt.opening,
            calls=calls,
            continued=prompt.continued,
            symbols=self.markers.symbols,
        )
        return TextStream(
            self.tokenizer,
            stops,
            params=params,
            parser=parser,
            markers=self.markers,
            one_call=one_call,
        )


def load_text(reference: str, vocab_size: int) -> TextTools:
    """The text side of a model reference that the engine has already loaded.

    Random models have no tokenizer of their own and get `byte_text`, or their family's byte
    vocabulary with markers.

    Raises:
        ModelError: the tokenizer or template is missing or malformed.
    """
    from metainfer.formats.source import resolve
    from metainfer.models.registry import random_config
    from metainfer.text.chat import ChatTemplate
    from metainfer.text.dialogue import JinjaFormat
    from metainfer.text.tokenizer import Tokenizer

    source = resolve(reference, fetch=False)
    if source.random is not None:
        config = random_config(source.random.family, source.random.params)
        if config.get("model_type") == DEEPSEEK_V4:
            return byte_deepseek(vocab_size)
        return byte_text(vocab_size)
    assert source.path is not None
    if source.kind == "gguf":
        tokenizer = Tokenizer.from_gguf_metadata(source.gguf_metadata)
        template = ChatTemplate.from_gguf_metadata(source.gguf_metadata, tokenizer.special_tokens)
        return TextTools(tokenizer, JinjaFormat(tokenizer, template))
    tokenizer = Tokenizer.from_folder(source.path)
    if source.config.get("model_type") == DEEPSEEK_V4:
        from metainfer.text.deepseek_v4 import BOS, EOS, DeepseekV4Format
        from metainfer.text.wire_pieces import find_pieces

        for marker, key in ((BOS, "bos_token_id"), (EOS, "eos_token_id")):
            _check_id(tokenizer, marker, key, source.config.get(key))
        return TextTools(tokenizer, DeepseekV4Format(tokenizer, find_pieces(source.path)))
    template = ChatTemplate.from_folder(source.path, tokenizer.special_tokens)
    return TextTools(tokenizer, JinjaFormat(tokenizer, template))


def _check_id(tokenizer: Tokenizer, marker: str, key: str, said: object) -> None:
    """The engine stops at the config's ids; the tokenizer must mean the same tokens."""
    found = tokenizer.token_id(marker)
    if isinstance(said, int) and said != found:
        raise ModelError(
            f"config.json gives {key} {said}; tokenizer.json gives {marker!r} the id {found}.",
            "The two files belong to different downloads; download both again.",
            code="bad_tokenizer",
        )


def byte_text(vocab_size: int) -> TextTools:
    """Text of a model without a tokenizer: ids 0-255 are bytes, id `i` above reads ``<i>``."""
    from metainfer.text.byte_text import PLAIN_TEMPLATE, byte_tokenizer
    from metainfer.text.chat import ChatTemplate
    from metainfer.text.dialogue import JinjaFormat

    tokenizer = byte_tokenizer(vocab_size)
    return TextTools(tokenizer, JinjaFormat(tokenizer, ChatTemplate(PLAIN_TEMPLATE)))


def byte_deepseek(vocab_size: int) -> TextTools:
    """DeepSeek-V4's prompts over bytes: its markers are ids 0 ..., the bytes follow.

    Efforts are those of the April release, whose default has no prefix.
    """
    from metainfer.text.byte_text import byte_tokenizer
    from metainfer.text.deepseek_v4 import MARKERS, DeepseekV4Format
    from metainfer.text.wire_pieces import find_pieces

    tokenizer = byte_tokenizer(vocab_size, MARKERS)
    return TextTools(tokenizer, DeepseekV4Format(tokenizer, find_pieces(None, ladder=False)))
