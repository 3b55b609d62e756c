"""What a grammar library has to offer, and what it is told about a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from metainfer.core.errors import MetaInferError
from metainfer.core.request import GrammarSpec

DEAD_END = "no token of this model spells what has to come next"


class GrammarError(MetaInferError):
    """The library does not take a grammar; the cause is its own."""

    default_code = "invalid_schema"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a mask speaks of. `pieces[i]`: bytes of id `i`, empty where it stands for
    nothing. `ends`: ids that end an answer. `control`: ids that are no text (special and added
    tokens, ends among them): no grammar lets them through except the ends. `encode`: ids of a text
    as the model knows it, for text that a grammar forces; without it, and where it adds to
    a text, the longest pieces are taken."""

    pieces: Sequence[bytes]
    ends: tuple[int, ...]
    control: tuple[int, ...]
    encode: Callable[[str], Sequence[int]] | None = None

    @property
    def size(self) -> int:
        return len(self.pieces)


class Matcher(Protocol):
    """One answer's place in a grammar."""

    def consume(self, tokens: Sequence[int]) -> int:
        """Go on over as many of `tokens` as are allowed; how many that were."""
        ...

    def rollback(self, count: int) -> None:
        """Forget the latest `count` consumed tokens."""
        ...

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        """Bit i of `words` [ceil(V / 32)], lowest first: id i may come next. An end may come where
        the answer is complete; where nothing else may, only ends may."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        ...

    @property
    def fault(self) -> str:
        """Why this grammar can no longer be followed (a limit was hit), or empty."""
        ...


class Compiled(Protocol):
    """A grammar ready to be started any number of times."""

    def start(self) -> Matcher: ...


class Backend(Protocol):
    """One library over one vocabulary."""

    vocabulary: Vocabulary

    def compile(self, spec: GrammarSpec) -> Compiled:
        """Prepare `spec`; other threads run meanwhile.

        Raises:
            GrammarError: the library refuses it; the cause is one line.
        """
        ...
