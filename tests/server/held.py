"""A model without weights that is held to a grammar: it says what it wants to as long as it may,
and from there on anything that is allowed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from fake_texts import TEXTS

from metainfer.engine.grammars import vocabulary_of
from metainfer.grammar.library import Library
from metainfer.grammar.llg import LLGuidance
from metainfer.grammar.state import GrammarState


def library(text: str, vocab: int, eos: int) -> Library:
    """Grammars over the vocabulary of a fake text side."""
    tokenizer = TEXTS[text](vocab).tokenizer
    return Library(LLGuidance(vocabulary_of(tokenizer, vocab, (eos,))))


def held(
    wanted: Iterator[int | None], state: GrammarState, eos: int, number: int = 0
) -> Iterator[int | None]:
    """The tokens drawn, None for the end. It ends wherever it may once it said something else."""
    rng = np.random.default_rng(number)
    on_script = True
    while True:
        allowed = state.allowed(())
        assert not state.fault, state.fault
        token = next(wanted) if on_script else None
        token = eos if token is None else token
        on_script &= bool(allowed[token])
        if not allowed[token]:
            token = int(rng.choice(allowed.nonzero()[0]))
        state.accept([token])
        yield None if token == eos else token
