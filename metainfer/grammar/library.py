"""`Library`: compiled grammars by their text, compiled on a thread of their own.

A compiled grammar stays as long as a request holds it; the latest ones stay a while longer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from metainfer.core.request import GrammarSpec
from metainfer.grammar.backend import Backend, Compiled
from metainfer.grammar.state import GrammarState

KEPT = 64

Key = tuple[str, str]


class Library:
    """Grammars over one vocabulary."""

    def __init__(self, backend: Backend, kept: int = KEPT) -> None:
        self._backend = backend
        self._kept = kept
        self._lock = threading.Lock()
        self._alive: WeakValueDictionary[Key, Compiled] = WeakValueDictionary()
        self._recent: OrderedDict[Key, Compiled] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "grammar")

    def find(self, spec: GrammarSpec) -> Compiled | None:
        """A compiled grammar if it is at hand."""
        with self._lock:
            return self._alive.get((spec.kind, spec.text))

    def prepare(self, spec: GrammarSpec) -> Future[Compiled]:
        """Compile on the library's thread; the future raises `GrammarError`."""
        return self._pool.submit(self.get, spec)

    def get(self, spec: GrammarSpec) -> Compiled:
        """Find or compile here.

        Raises:
            GrammarError: the backend refuses it.
        """
        found = self.find(spec)
        if found is None:
            found = self._backend.compile(spec)
        key = spec.kind, spec.text
        with self._lock:
            found = self._alive.setdefault(key, found)
            self._recent[key] = found
            self._recent.move_to_end(key)
            while len(self._recent) > self._kept:
                self._recent.popitem(last=False)
        return found

    def open(self, spec: GrammarSpec, generated: Sequence[int]) -> GrammarState:
        """The state of a request that enters, or re-enters after `generated` was drawn."""
        state = GrammarState(spec, self.get(spec), self._backend.vocabulary)
        state.accept(generated)
        return state

    def close(self) -> None:
        """Let the thread go; what it compiles ends first."""
        self._pool.shutdown(wait=False, cancel_futures=True)
