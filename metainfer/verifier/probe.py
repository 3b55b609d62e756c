"""Between the model and its ops: every call of a running engine can be watched or replaced.

A `Probe` is the engine's `Trace`; while `taps` is empty a call costs one test more. Calls inside a
captured graph do not pass here. Calls of one forward are numbered by site, and weights by their
own site, in the order of layers: the n-th matrix at a site is the n-th `WeightSpec` with that site.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from metainfer.core.step import Phase
from metainfer.kernels.table import Function, Trace
from metainfer.ops.linear.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Call:
    """One call: `number` counts those of its site in this forward, from 0; `weights` says of each
    `PackedWeight` argument (its site, its number there)."""

    op: str
    site: str
    phase: Phase
    impl: str
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: tuple[tuple[str, int], ...]


class Tap(Protocol):
    """Sees a call; `go` runs it (or the next tap) and gives its result."""

    def __call__(self, call: Call, go: Function) -> Any: ...


class Probe(Trace):
    """`taps`: applied from the first (outermost) to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.taps: list[Tap] = []
        self._counts: Counter[tuple[Phase, str]] = Counter()

    @contextmanager
    def tapped(self, *taps: Tap) -> Iterator[None]:
        """`taps` inside those already there, for as long as the block runs."""
        before = list(self.taps)
        self.taps = [*before, *taps]
        try:
            yield
        finally:
            self.taps = before

    def wrap(self, function: Function, phase: Phase, site: str, impl: str) -> Function:
        inner = super().wrap(function, phase, site, impl)
        op = impl.partition("/")[0]

        def probed(*args: Any, **kwargs: Any) -> Any:
            if not self.taps:
                return inner(*args, **kwargs)
            return self._tap(inner, (op, site, phase, impl), args, kwargs)

        return probed

    def _tap(
        self,
        inner: Function,
        use: tuple[str, str, Phase, str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        op, site, phase, impl = use
        if op == "embed":  # a forward begins
            for key in [key for key in self._counts if key[0] is phase]:
                del self._counts[key]
        weights = tuple(
            (arg.site, self._next(phase, f"weight of {arg.site}"))
            for arg in args
            if isinstance(arg, PackedWeight)
        )
        call = Call(op, site, phase, impl, self._next(phase, site), args, kwargs, weights)

        def go(depth: int, function: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                if depth == len(self.taps):
                    return function(*args, **kwargs)
                return self.taps[depth](call, go(depth + 1, function))

            return run

        return go(0, inner)(*args, **kwargs)

    def calls_of(self, site: str) -> int:
        """How often the latest forward of any phase called `site`."""
        return max((n for (_, key), n in self._counts.items() if key == site), default=0)

    def _next(self, phase: Phase, key: str) -> int:
        self._counts[phase, key] += 1
        return self._counts[phase, key] - 1
