"""Streaming text equals the whole text, whatever the split; little is held back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_backends import BACKENDS

from metainfer.text.detokenize import IncrementalDetokenizer
from metainfer.text.pieces import byte_alphabet
from metainfer.text.tokenizer import Tokenizer

NUMBERS = st.lists(st.integers(0, 10**6), max_size=40)


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip_special: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pairs = pairwise(borders)
    return [*(detokenizer.push(ids[a:b]) for a, b in pairs), detokenizer.flush()]


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=120, deadline=None)
@given(numbers=NUMBERS, cuts=NUMBERS)
def test_any_split_gives_the_whole_text(
    backends: Mapping[str, Tokenizer],
    name: str,
    skip_special: bool,
    numbers: list[int],
    cuts: list[int],
) -> None:
    tokenizer = backends[name]
    ids = [number % (tokenizer.vocab_size + 2) for number in numbers]
    whole = tokenizer.decode(ids, skip_special)
    assert "".join(stream(tokenizer, ids, cuts, skip_special)) == whole
    one_by_one = stream(tokenizer, ids, list(range(len(ids))), skip_special)
    assert "".join(one_by_one) == whole


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_real_vocabulary(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, parse_special=False)
    shown = "".join(stream(smollm2, ids, list(range(len(ids))), True))
    assert shown == smollm2.decode(ids)
    # The vocabulary lacks F1 to F4 and some control bytes; both engines drop them.
    known = {b for char, b in byte_alphabet().items() if smollm2.token_id(char) is not None}
    assert len(known) > 200
    if known.issuperset(text.encode()):
        assert shown == text


def test_only_an_incomplete_character_is_held_back(backends: Mapping[str, Tokenizer]) -> None:
    tokenizer = backends["pieces"]
    detokenizer = IncrementalDetokenizer(tokenizer)

    def byte(value: int) -> list[int]:
        return [tokenizer.token_id(f"<0x{value:02X}>") or 0]

    raw = "a€".encode()
    assert detokenizer.push(byte(raw[0])) == "a"
    assert [detokenizer.push(byte(b)) for b in raw[1:]] == ["", "", "€"]
    assert detokenizer.push(byte(0xE2)) == ""
    # 'A' cannot continue the character, so both come out at once.
    assert detokenizer.push(byte(0x41)) == "\ufffdA"
    assert detokenizer.push(byte(0xF0)) == "" and detokenizer.flush() == "\ufffd"


def test_special_tokens_neither_show_nor_break_characters(
    backends: Mapping[str, Tokenizer],
) -> None:
    tokenizer = backends["pieces"]
    special = tokenizer.token_id("</s>")
    euro = [tokenizer.token_id(f"<0x{b:02X}>") for b in "€".encode()]
    assert special is not None
    ids = [i for i in (euro[0], special, euro[1], euro[2], special) if i is not None]
    shown = IncrementalDetokenizer(tokenizer, skip_special=False)
    hidden = IncrementalDetokenizer(tokenizer)
    assert "".join(hidden.push([i]) for i in ids) == "€"
    assert "".join(shown.push([i]) for i in ids) == "\ufffd</s>\ufffd\ufffd</s>"


def test_a_generic_decoder_is_not_waited_for_for_ever(backends: Mapping[str, Tokenizer]) -> None:
    class Broken(Tokenizer):
        def decode(self, ids: object, skip_special: bool = True) -> str:
            return "\ufffd" * len(list(ids))  # type: ignore[call-overload]

    tokenizer = Broken(BACKENDS["words"]())
    detokenizer = IncrementalDetokenizer(tokenizer)
    texts = [detokenizer.push([1]) for _ in range(200)]
    assert any(texts) and len("".join(texts) + detokenizer.flush()) == 200


@pytest.mark.parametrize("name", ["bytes", "pieces", "words"])
def test_cost_per_token_does_not_grow(name: str) -> None:
    class Counting(Tokenizer):
        handled = 0

        def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
            ids = list(ids)
            self.handled += len(ids)
            return super().decode(ids, skip_special)

        def join(self, ids: Sequence[int], *, at_start: bool = True) -> bytes:
            self.handled += len(ids)
            return super().join(ids, at_start=at_start)

    tokenizer = Counting(BACKENDS[name]())
    detokenizer = IncrementalDetokenizer(tokenizer)
    for place in range(4000):
        detokenizer.push([place % tokenizer.vocab_size])
    assert 4000 - 100 <= tokenizer.handled <= 4000 * 20
