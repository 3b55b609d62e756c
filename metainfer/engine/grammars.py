"""Requests with a grammar wait beside the loop until it is compiled; then they are scheduled.

The loop never compiles: a heavy schema delays its own request and nobody else's. What the server
let through is compiled here again, over the model's vocabulary.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from metainfer.core.errors import ModelError, RequestError
from metainfer.core.request import Request
from metainfer.grammar.backend import Compiled, GrammarError, Vocabulary
from metainfer.grammar.backends import opened, require
from metainfer.grammar.library import Library

if TYPE_CHECKING:
    from metainfer.text.tokenizer import Tokenizer

IDLE_WAIT_S = 0.005
"""How long a turn without work waits for a compile."""


def vocabulary_of(tokenizer: Tokenizer, size: int, ends: tuple[int, ...]) -> Vocabulary:
    """The first `size` ids of a tokenizer as a grammar sees them."""
    control = tuple(i for i in tokenizer.added_ids if i < size)
    pieces = [tokenizer.token_bytes(token) for token in range(size)]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False)

    encode("a")  # the tokenizer builds its literal twin at first use, which takes a moment
    return Vocabulary(pieces, tuple(i for i in ends if i < size), control, encode)


def open_library(
    name: str, reference: str, size: int, ends: tuple[int, ...]
) -> tuple[Library | None, str]:
    """The plan's library `name` over a model's vocabulary, or None and why there is none."""
    from metainfer.engine.model_text import load_text

    try:
        require(name)
        if not ends:
            return None, "The model names no token that ends an answer."
        tokenizer = load_text(reference, size).tokenizer
    except (RequestError, ModelError) as error:
        return None, str(error)
    return Library(opened(name, vocabulary_of(tokenizer, size, ends))), ""


class GrammarDesk:
    """What waits for its grammar, and the grammars that running requests hold."""

    def __init__(self, library: Library | None, why_not: str = "") -> None:
        self._library = library
        self._why_not = why_not
        self._waiting: dict[str, tuple[Request, Future[Compiled]]] = {}
        self._held: dict[str, Compiled] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, request: Request) -> bool:
        """Whether `request` has to wait; if not, its grammar is at hand and stays.

        Raises:
            RequestError: 400; grammars cannot be had here, or contradict `ignore_eos`.
        """
        spec = request.params.grammar
        if spec is None:
            return False
        if self._library is None:
            raise RequestError(
                f"Structured output is not available: {self._why_not}",
                param="response_format",
                code="unsupported_parameter",
            )
        if request.params.ignore_eos:
            raise RequestError(
                "ignore_eos contradicts a grammar, whose end is the answer's end.",
                "Leave one of them out.",
                param="ignore_eos",
            )
        found = self._library.find(spec)
        if found is not None:
            self._held[request.request_id] = found
            return False
        self._waiting[request.request_id] = request, self._library.prepare(spec)
        return True

    def ready(self, *, idle: bool) -> list[tuple[Request, str]]:
        """Requests whose compile has ended, each with its error or empty; `idle` waits a moment."""
        if not self._waiting:
            return []
        futures = [future for _, future in self._waiting.values()]
        done = wait(futures, IDLE_WAIT_S if idle else 0, FIRST_COMPLETED).done
        found = []
        for name, (request, future) in list(self._waiting.items()):
            if future not in done:
                continue
            del self._waiting[name]
            try:
                self._held[name] = future.result()
                found.append((request, ""))
            except GrammarError as error:
                found.append((request, f"its grammar was refused: {error}"))
        return found

    def waits(self, request_id: str) -> bool:
        """Whether a request has not been scheduled yet."""
        return request_id in self._waiting

    def forget(self, request_id: str) -> None:
        """A request has ended or will never begin."""
        held = self._waiting.pop(request_id, None)
        if held is not None:
            held[1].cancel()
        self._held.pop(request_id, None)

    def close(self) -> None:
        """Let the compiler's thread go."""
        if self._library is not None:
            self._library.close()
