"""A model without weights that is held to a grammar: it says what it wants to as long as it may,
and from there on anything that is allowed, often what brings a text to its end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from fake_texts import TEXTS

from metainfer.core.request import GrammarSpec
from metainfer.engine.grammars import vocabulary_of
from metainfer.grammar.library import Library
from metainfer.grammar.llg import LLGuidance


class Held:
    """Such models over the vocabulary of a fake text side."""

    def __init__(self, text: str, vocab: int, eos: int) -> None:
        tokenizer = TEXTS[text](vocab).tokenizer
        vocabulary = vocabulary_of(tokenizer, vocab, (eos,))
        self._eos = eos
        self._library = Library(LLGuidance(vocabulary))
        endings = ('"', "</｜DSML｜", "}")  # of texts, of DSML's texts, of objects
        self._endings = [tokenizer.encode(text, add_special=False) for text in endings]

    def say(self, wanted: Iterator[int | None], spec: GrammarSpec) -> Iterator[int | None]:
        """The tokens drawn, None for the end."""
        state = self._library.open(spec, ())
        rng = np.random.default_rng(0)
        on_script, ending = True, list[int]()
        while True:
            mask = state.allowed(())
            assert not state.fault, state.fault
            token = next(wanted) if on_script else None
            token = self._eos if token is None else token
            on_script &= bool(mask[token])
            if not on_script and not mask[token]:
                if not ending and rng.random() < 0.2:
                    ending = list(self._endings[rng.integers(len(self._endings))])
                if ending and not mask[ending[0]]:
                    ending = []
                token = ending.pop(0) if ending else int(rng.choice(mask.nonzero()[0]))
            state.accept([token])
            yield None if token == self._eos else token
