"""How an implementation is launched, by what was measured: settings, records, the nearest one.

A record belongs to a class of cards (capability, multiprocessors, memory), never to a product's
name, and to one implementation, type, phase and shape. Where the very shape was not tuned, the
nearest entry of the class is borrowed; then that of the nearest class of the same capability. What
is borrowed is marked, and ranks nothing: its seconds were another shape's (B-07). No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metainfer.core.digest import canonical_json
from metainfer.core.errors import UserError
from metainfer.core.records import Fingerprint, Record, RecordStore
from metainfer.core.verdict import Reason
from metainfer.kernels.impl import Impl, OpRequest, Setting
from metainfer.platform.facts import Facts

KIND = "kernels"
"""Of the records."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Tuned:
    """Keyword arguments of an implementation's function. `seconds` of one call, of the very shape
    alone; `source`: empty for a hit, else what it was borrowed from."""

    values: Mapping[str, Any]
    seconds: float | None = None
    source: str = ""

    @property
    def text(self) -> str:
        """What the record is of."""
        return f"borrowed from {self.source}" if self.source else "measured here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record. `source`: digest of the kernel's sources when it was taken."""

    impl: str
    dtype: str
    phase: str
    shape: Mapping[str, int]
    values: Mapping[str, Any]
    seconds: float
    source: str
    card: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.impl}:{self.dtype}:{self.phase}:{canonical_json(dict(self.shape))}"


def nothing_tuned(impl: Impl, request: OpRequest) -> Tuned | None:
    """The records of a machine that has none."""
    return None


def card_class(facts: Facts) -> Fingerprint:
    """What a launch's speed follows: no name, no bus, no serial number."""
    device = facts.device
    capability = facts.host.architecture if device.capability is None else list(device.capability)
    memory = None if device.memory_bytes is None else round(device.memory_bytes / GIB)
    return Fingerprint(
        {"kind": device.kind, "capability": capability, "units": device.units, "memory_gib": memory}
    )


def fitting(settings: Sequence[Setting], limit: int | None) -> tuple[list[Setting], list[Reason]]:
    """Settings whose shared memory a block can have, before anything is compiled; reasons against
    the others. An unknown limit keeps all."""
    kept, refused = [], []
    for setting in settings:
        if limit is None or setting.shared_bytes <= limit:
            kept.append(setting)
            continue
        text = f"{setting.text} needs {setting.shared_bytes:,} B of shared memory of {limit:,} B"
        data = {"needed": setting.shared_bytes, "limit": limit}
        refused.append(Reason("shared-memory", text, data))
    return kept, refused


class Tunings:
    """The entries of one class of cards, and of its neighbours.

    Args:
        sources: implementation id -> digest of its present sources; an entry of others is void.
    """

    def __init__(
        self, own: Iterable[Entry], others: Iterable[Entry], sources: Mapping[str, str]
    ) -> None:
        self._own = [e for e in own if sources.get(e.impl) == e.source]
        self._others = [e for e in others if sources.get(e.impl) == e.source]
        self._tuned = {entry.impl for entry in (*self._own, *self._others)}

    def find(self, impl: Impl, request: OpRequest, units: int | None) -> Tuned | None:
        """What to launch `impl` with; None: nothing was tuned, its own default. `units`: here."""
        if impl.id not in self._tuned:
            return None
        own = _nearest(self._own, impl, request)
        if own is not None:
            entry, distance = own
            if distance == 0 and entry.phase == request.phase.value:
                return Tuned(entry.values, entry.seconds)
            return Tuned(entry.values, None, f"{entry.phase} at {_shape(entry.shape)}")
        apart = sorted({_apart(entry, units) for entry in self._others if entry.impl == impl.id})
        for distance in apart:
            near = [entry for entry in self._others if _apart(entry, units) == distance]
            found = _nearest(near, impl, request)
            if found is not None:
                entry, card = found[0], found[0].card
                where = f"{card['units']} units with {card['memory_gib']} GiB"
                text = f"{entry.phase} at {_shape(entry.shape)} on {where}"
                return Tuned(entry.values, None, text)
        return None


def read(store: RecordStore, own: Fingerprint, sources: Mapping[str, str]) -> Tunings:
    """The records of this class of cards, and of others with the same kind and capability.

    Raises:
        UserError: a file of them holds something else.
    """
    others = []
    for other in store.other_machines(KIND):
        same = all(other.facts.get(key) == own.facts.get(key) for key in ("kind", "capability"))
        if same:
            others += _entries(store.of(other), other)
    return Tunings(_entries(store, own), others, sources)


def record(entry: Entry, conditions: Mapping[str, object]) -> Record:
    """`entry` as the store keeps it."""
    payload = {
        "impl": entry.impl,
        "dtype": entry.dtype,
        "phase": entry.phase,
        "shape": dict(entry.shape),
        "values": dict(entry.values),
        "seconds": entry.seconds,
        "source": entry.source,
    }
    return Record(KIND, entry.key, payload, conditions)


def _entries(store: RecordStore, card: Fingerprint) -> list[Entry]:
    found: list[Any] = [kept.payload for kept in store.all(KIND)]
    try:
        return [Entry(**payload, card=card.facts) for payload in found]
    except TypeError as error:
        raise UserError(
            f"record file {store.path(KIND)} has an entry that cannot be read: {error}.",
            "Delete it, then: metainfer tune kernels MODEL.",
            code="bad_record",
        ) from error


def _nearest(
    entries: Iterable[Entry], impl: Impl, request: OpRequest
) -> tuple[Entry, float] | None:
    """The entry of the nearest shape, of the same phase if there is one."""
    same = [e for e in entries if (e.impl, e.dtype) == (impl.id, request.dtype)]
    if not same:
        return None

    def rank(entry: Entry) -> tuple[bool, float, str]:
        other = entry.phase != request.phase.value
        return other, _distance(entry.shape, request.shape), entry.key

    best = min(same, key=rank)
    return best, _distance(best.shape, request.shape)


def _apart(entry: Entry, units: int | None) -> float:
    """Doublings of multiprocessors between an entry's card and one of `units`."""
    own = entry.card.get("units")
    return _ratio(own if isinstance(own, int) else 1, units or 1)


def _distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """Doublings between two shapes, over all extents; an extent that one lacks counts as 1."""
    return sum(_ratio(a.get(name, 1), b.get(name, 1)) for name in {*a, *b})


def _ratio(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1)) - math.log2(max(b, 1)))


def _shape(shape: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(shape.items()))
