"""Tokenizers for models without files (``random:``): every byte is a token.

Ids 0-255 are bytes and id `i` above reads ``<i>``. A family that declares markers gets them
first: marker `k` is special token `k`, and byte `b` is id ``len(markers) + b``.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from metainfer.core.errors import ModelError
from metainfer.text.pieces import byte_alphabet
from metainfer.text.tokenizer import Tokenizer

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(vocab_size: int, markers: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of `vocab_size` ids; the first two markers are BOS and EOS.

    Raises:
        ModelError: the vocabulary has no room for the markers and all bytes.
    """
    if markers and vocab_size < len(markers) + 256:
        raise ModelError(
            f"A vocabulary of {vocab_size} has no room for {len(markers)} markers and 256 bytes.",
            "Use a random model with a larger vocabulary.",
            code="bad_tokenizer",
        )
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    names = [*markers, *(letters[byte] for byte in range(256))][:vocab_size]
    names += [f"<{value}>" for value in range(len(names), vocab_size)]
    vocab = {name: value for value, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in markers])
    roles = dict(zip(("bos_token", "eos_token"), markers, strict=False))
    return Tokenizer(backend, special_tokens=roles, add_bos=False, vocab_size=vocab_size)
