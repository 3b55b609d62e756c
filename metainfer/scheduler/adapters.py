"""Adapters as the scheduler knows them: names, places on the device, digests of content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from metainfer.core.errors import RequestError
from metainfer.core.step import NO_ADAPTER
from metainfer.scheduler.sequence import Sequence


class Adapters:
    """A fixed set, by name -> digest; a place is the position in it."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        self._digests = dict(digests)
        self._places = {name: place for place, name in enumerate(digests)}

    def check(self, name: str) -> None:
        """Refuse a name that was not loaded (404 ``model_not_found``)."""
        if name and name not in self._places:
            listed = ", ".join(self._places) or "none"
            raise RequestError(
                f"adapter {name[:200]!r} is not loaded.",
                f"Loaded: {listed}.",
                status=404,
                error_type="not_found_error",
                param="model",
                code="model_not_found",
            )

    def place(self, name: str) -> int:
        return self._places[name] if name else NO_ADAPTER

    def digest(self, name: str) -> str:
        """What a page's name holds of it; empty for the model itself."""
        return self._digests[name] if name else ""

    def in_use(self, sequences: Iterable[Sequence]) -> tuple[str, ...]:
        """Names of the adapters of some sequences, in the order of their places."""
        if not self._places:
            return ()
        used = {seq.request.adapter for seq in sequences}
        return tuple(name for name in self._places if name in used)
