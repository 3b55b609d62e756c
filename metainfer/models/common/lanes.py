"""Lanes: passes through a model that take turns, so that one computes while another waits.

A model writes its pass as a lane, which pauses wherever ranks are at work for it. Alone it goes on
at once. Of two lanes, one for each half of a chunk's rows, the other computes meanwhile. The later
rows read what the earlier wrote: lanes pause at the same places, and the first is always ahead.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Lane = Generator[None, None, T]


def interleave(lanes: Sequence[Lane[T]]) -> list[T]:
    """Run `lanes` in turns from pause to pause, in their order; what each returns."""
    found: dict[int, T] = {}
    going = dict(enumerate(lanes))
    while going:
        for number, lane in list(going.items()):
            try:
                next(lane)
            except StopIteration as end:
                found[number] = end.value
                del going[number]
    return [found[number] for number in range(len(lanes))]


def alone(lane: Lane[T]) -> T:
    """One lane from end to end."""
    return interleave([lane])[0]
