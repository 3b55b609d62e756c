"""Marker tokens reach the parser as symbols, whatever the cut."""

from __future__ import annotations

import random

import pytest
import tokenizers
from text_backends import byte_level_backend
from tokenizers import AddedToken

from metainfer.text.markers import MarkedDetokenizer, MarkerTokens
from metainfer.text.markup import DEEPSEEK, QWEN3
from metainfer.text.scan import symbol
from metainfer.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Reasoning tags special, the DSML token an ordinary added one, as vocabularies vary."""
    backend: tokenizers.Tokenizer = byte_level_backend()
    backend.add_special_tokens(["<think>", "</think>"])
    backend.add_tokens([AddedToken("｜DSML｜", normalized=False)])
    return Tokenizer(backend)


def test_only_tokens_are_symbols(tokenizer: Tokenizer) -> None:
    markers = MarkerTokens(DEEPSEEK, tokenizer)
    assert list(markers.symbols) == ["<think>", "</think>", "｜DSML｜"]
    assert MarkerTokens(QWEN3, tokenizer).symbols.keys() == {"<think>", "</think>"}
    text = "é<think>名</think><｜DSML｜x> \ufdd0</s>"
    read = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(tokenizer.encode_literal(text), skip_special=False) == text
    spelled = tokenizer.encode_literal(text)
    shown = f"é{symbol(0)}名{symbol(1)}<{symbol(2)}x> \ufffd"
    for ids, expected in ((read, shown), (spelled, text.replace("\ufdd0", "\ufffd"))):
        # "</s>" is a special token and no marker: shown only where it was spelled.
        at_once = MarkedDetokenizer(tokenizer, markers)
        assert at_once.push(ids) + at_once.flush() == expected
        for _ in range(20):
            detokenizer = MarkedDetokenizer(tokenizer, markers)
            got, at = "", 0
            while at < len(ids):
                size = random.randint(1, 4)
                got += detokenizer.push(ids[at : at + size])
                at += size
            assert got + detokenizer.flush() == expected


def test_a_marker_completes_what_stood_before_it(tokenizer: Tokenizer) -> None:
    markers = MarkerTokens(DEEPSEEK, tokenizer)
    start = tokenizer.token_id("Ã")
    assert start is not None
    close = tokenizer.token_id("</think>")
    detokenizer = MarkedDetokenizer(tokenizer, markers)
    assert detokenizer.push([start]) == ""
    assert detokenizer.push([close]) == "\ufffd" + symbol(1)
