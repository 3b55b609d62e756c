"""Discrete events over shared resources: when each transfer of a schedule ends.

A resource (a port's direction, an uplink, the crossing, host memory) is shared evenly by the
transfers on it; a transfer moves at the least of its shares, and no one takes over what another
leaves unused. That is below max-min fairness where bottlenecks differ, and equal to it where a
schedule is symmetric, as collectives are. In exchange three laws hold for independent transfers,
which max-min fairness breaks (tests have the counterexample): a slower resource, a larger transfer
or an additional one never makes any transfer end earlier.

Time in microseconds, rates in bytes per microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

_TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """`bytes` over `path` at `share` of what the path gives, begun `delay_us` after every transfer
    of `after` has ended, known at the other end `latency_us` after its last byte. Without a path it
    is a wait. `fan`: its source switch and the socket it writes into, for `Network.collapse`."""

    path: tuple[str, ...] = ()
    bytes: float = 0.0
    after: tuple[int, ...] = ()
    delay_us: float = 0.0
    latency_us: float = 0.0
    share: float = 1.0
    fan: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Rates by resource. `fan_in[name]`: exponent p; a resource with n transfers on it gives only
    ``n ** -p`` of its rate. `collapse`: what is left of the writes of a switch that reach more
    than one socket at once."""

    rates: Mapping[str, float]
    fan_in: Mapping[str, float] = field(default_factory=dict)
    collapse: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`ends[i]`: when transfer i is known to have arrived; `busy[name]`: bytes over a resource;
    `critical`: the chain of transfers that the last one waited for, in order."""

    ends: tuple[float, ...]
    busy: Mapping[str, float]
    critical: tuple[int, ...]

    @property
    def us(self) -> float:
        return max(self.ends, default=0.0)


def simulate(schedule: Sequence[Transfer], network: Network) -> Outcome:
    """Run a schedule; `after` may only name earlier transfers.

    Raises:
        ValueError: a transfer waits for itself or a later one, or crosses an unknown resource.
    """
    _check(schedule, network)
    ends: list[float] = [inf] * len(schedule)
    waiting = [len(item.after) for item in schedule]
    next_of: list[list[int]] = [[] for _ in schedule]
    for index, item in enumerate(schedule):
        for before in item.after:
            next_of[before].append(index)
    starts = {i: item.delay_us for i, item in enumerate(schedule) if not item.after}
    moving: dict[int, float] = {}
    arriving: dict[int, float] = {}
    now = 0.0
    while starts or moving or arriving:
        rates = _rates(schedule, moving, network)
        finish = {i: now + left / rates[i] for i, left in moving.items()}
        then = min((*starts.values(), *finish.values(), *arriving.values()))
        for index in moving:
            moving[index] -= rates[index] * (then - now)
        now = then
        for index in [i for i, at in finish.items() if at <= now + _TINY]:
            del moving[index]
            arriving[index] = now + schedule[index].latency_us
        for index in [i for i, at in starts.items() if at <= now + _TINY]:
            del starts[index]
            if schedule[index].path and schedule[index].bytes > 0:
                moving[index] = schedule[index].bytes
            else:
                arriving[index] = now + schedule[index].latency_us
        for index in [i for i, at in arriving.items() if at <= now + _TINY]:
            ends[index] = arriving.pop(index)
            for after in next_of[index]:
                waiting[after] -= 1
                if not waiting[after]:
                    starts[after] = now + schedule[after].delay_us
    return Outcome(ends=tuple(ends), busy=_busy(schedule), critical=_critical(schedule, ends))


def _check(schedule: Sequence[Transfer], network: Network) -> None:
    for index, item in enumerate(schedule):
        if any(not 0 <= before < index for before in item.after):
            raise ValueError(f"transfer {index} waits for {item.after}, not all before it")
        unknown = [name for name in item.path if name not in network.rates]
        if unknown:
            raise ValueError(f"transfer {index} crosses {unknown[0]!r}, which does not exist")


def _rates(
    schedule: Sequence[Transfer], moving: Mapping[int, float], network: Network
) -> dict[int, float]:
    users: dict[str, int] = {}
    reached: dict[str, set[int]] = {}
    for index in moving:
        for name in schedule[index].path:
            users[name] = users.get(name, 0) + 1
        fan = schedule[index].fan
        if fan is not None:
            reached.setdefault(fan[0], set()).add(fan[1])
    part = {
        name: network.rates[name] * count ** -network.fan_in.get(name, 0.0) / count
        for name, count in users.items()
    }
    rates = {}
    for index in moving:
        item = schedule[index]
        rate = item.share * min(part[name] for name in item.path)
        if item.fan is not None and len(reached[item.fan[0]]) > 1:
            rate *= network.collapse
        rates[index] = rate
    return rates


def _busy(schedule: Sequence[Transfer]) -> dict[str, float]:
    busy: dict[str, float] = {}
    for item in schedule:
        for name in item.path:
            busy[name] = busy.get(name, 0.0) + item.bytes
    return busy


def _critical(schedule: Sequence[Transfer], ends: Sequence[float]) -> tuple[int, ...]:
    if not schedule:
        return ()
    index = max(range(len(schedule)), key=lambda i: ends[i])
    chain = [index]
    while schedule[index].after:
        index = max(schedule[index].after, key=lambda i: ends[i])
        chain.append(index)
    return tuple(reversed(chain))
