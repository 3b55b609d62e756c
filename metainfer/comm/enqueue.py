"""The driver calls of a collective, written down once and carried out again and again.

A sum by copy engines is some hundred driver calls. Each made from Python costs the interpreter five
times what it costs the driver, so the card waited for the host. Steps are plain records, in order;
one call into C carries them out (`enqueue.c`), without the interpreter's lock. Where C cannot be
built, the interpreter carries out the same steps, and `Loop.refused` says why.

What differs between calls are *bases*: where operands lie, whose stream waits, how far counters
are. A field is a number, or an offset behind a base (`Behind`), modulo 2^64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from metainfer.comm import driver
from metainfer.kernels import native

SOURCE = Path(__file__).with_name("enqueue.c")
WORD = (1 << 64) - 1
NOTHING = 0
"""The base of plain numbers, always 0."""


class Kind(IntEnum):
    """What a step does; up to `LAUNCH` by functions of the driver, `driver.IN_STREAMS`."""

    RECORD = 0
    FOLLOW = 1
    DOWN = 2
    UP = 3
    ACROSS = 4
    WRITE = 5
    AWAIT = 6
    LAUNCH = 7
    PUT = 8


@dataclass(frozen=True, slots=True)
class Behind:
    """`offset` behind what `base` is by the time of a call."""

    base: int
    offset: int = 0

    def __add__(self, more: int) -> Behind:
        return Behind(self.base, self.offset + more)


Field = int | Behind


class Step(ctypes.Structure):
    """``MiStep`` of ``enqueue.c``: stream and three operands, the last a plain number."""

    _fields_ = (
        ("offset", ctypes.c_uint64 * 4),
        ("base", ctypes.c_uint16 * 3),
        ("kind", ctypes.c_uint16),
    )


@dataclass(frozen=True, slots=True)
class Program:
    """Steps of one collective. `counted`: by base, how much a call adds to it beforehand; `kept`:
    what steps point to."""

    steps: ctypes.Array[Step]
    counted: Mapping[int, int]
    kept: tuple[Any, ...]


class Steps:
    """Writes a program down; addresses, sizes and values are fields."""

    def __init__(self) -> None:
        self._rows: list[tuple[Kind, tuple[Field, Field, Field], int]] = []
        self._counted: dict[int, int] = {}
        self._kept: list[Any] = []

    def record(self, event: int, stream: Field) -> None:
        """`event` is what `stream` holds by now."""
        self._add(Kind.RECORD, stream, event)

    def follow(self, stream: Field, event: int) -> None:
        """`stream` goes on behind `event`."""
        self._add(Kind.FOLLOW, stream, event)

    def copy(self, kind: Kind, to: Field, start: Field, size: int, stream: int) -> None:
        """`size` bytes: `DOWN` to the host, `UP` from it, or `ACROSS` the device."""
        self._add(kind, stream, to, start, size)

    def write(self, word: int, value: Field, stream: int) -> None:
        """A counter, behind everything that `stream` has written."""
        self._add(Kind.WRITE, stream, word, value)

    def wait(self, word: int, value: Field, stream: int) -> None:
        """`stream` waits until a counter has come to `value`."""
        self._add(Kind.AWAIT, stream, word, value)

    def launch(
        self,
        function: int,
        grid: int,
        block: int,
        stream: int,
        arguments: Sequence[Any],
        fields: Mapping[int, Field],
    ) -> None:
        """A kernel. `arguments`: ctypes values; `fields`: what is put there before, by address."""
        for address, field in fields.items():
            self._add(Kind.PUT, NOTHING, address, field)
        given = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        self._kept += [given, *arguments]
        self._add(Kind.LAUNCH, stream, function, ctypes.addressof(given), grid << 32 | block)

    def launch_words(
        self, function: int, stream: int, words: Sequence[Field], grid: int = 1, block: int = 1
    ) -> None:
        """A kernel whose arguments are all words of eight bytes."""
        arguments = [driver.u64(0) for _ in words]
        fields = {ctypes.addressof(each): word for each, word in zip(arguments, words, strict=True)}
        self.launch(function, grid, block, stream, arguments, fields)

    def count(self, base: int) -> Behind:
        """One more of a counter: its value from here on."""
        self._counted[base] = self._counted.get(base, 0) + 1
        return Behind(base, self._counted[base])

    def written(self) -> Program:
        """All of it. Counters are counted on before a call, so values lie before where they end."""
        steps = (Step * len(self._rows))()
        for step, (kind, fields, number) in zip(steps, self._rows, strict=True):
            step.kind, step.offset[3] = kind, number
            for place, field in enumerate(fields):
                base, offset = (
                    (field.base, field.offset) if isinstance(field, Behind) else (NOTHING, field)
                )
                step.base[place] = base
                step.offset[place] = (offset - self._counted.get(base, 0)) & WORD
        return Program(steps, dict(self._counted), tuple(self._kept))

    def _add(self, kind: Kind, stream: Field, a: Field, b: Field = 0, c: int = 0) -> None:
        self._rows.append((kind, (stream, a, b), c))


Calls = Sequence[Any]
"""The driver's functions in the order of `Kind`, as `driver.in_streams` gives them."""


def in_c(calls: Calls, library: ctypes.CDLL) -> Callable[[Program, Any], tuple[int, int]]:
    """A loop over steps in C: how many were carried out, and the status of the one that failed."""
    table = (ctypes.c_void_p * len(calls))(
        *(ctypes.cast(each, ctypes.c_void_p).value for each in calls)
    )
    run = library.mi_enqueue
    run.restype = ctypes.c_uint64
    run.argtypes = (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p),
    )

    def loop(program: Program, bases: Any) -> tuple[int, int]:
        status = ctypes.c_int()
        done = run(table, program.steps, len(program.steps), bases, ctypes.byref(status))
        return done, status.value

    return loop


def in_python(calls: Calls) -> Callable[[Program, Any], tuple[int, int]]:
    """The same by the interpreter."""
    record, follow, down, up, across, write, wait, launch = calls
    copies = {Kind.DOWN: down, Kind.UP: up, Kind.ACROSS: across}

    def one(step: Step, bases: Any) -> int:
        *behind, c = step.offset
        stream, a, b = (
            (offset + bases[base]) & WORD for offset, base in zip(behind, step.base, strict=True)
        )
        kind = step.kind
        if kind == Kind.RECORD:
            return int(record(a, stream))
        if kind == Kind.FOLLOW:
            return int(follow(stream, a, 0))
        if kind in copies:
            return int(copies[kind](a, b, c, stream))
        if kind == Kind.LAUNCH:
            grid, block = c >> 32, c & 0xFFFFFFFF
            return int(launch(a, grid, 1, 1, block, 1, 1, 0, stream, b, 0))
        if kind == Kind.PUT:
            ctypes.c_uint64.from_address(a).value = b
            return 0
        return int((write if kind == Kind.WRITE else wait)(stream, a, b, 0))

    def loop(program: Program, bases: Any) -> tuple[int, int]:
        for done, step in enumerate(program.steps):
            if failed := one(step, bases):
                return done, failed
        return len(program.steps), 0

    return loop


class Loop:
    """Carries programs out through `calls`: in C, or by the interpreter for the reasons that
    `refused` has."""

    def __init__(self, calls: Calls) -> None:
        library, self.refused = native.try_load(SOURCE)
        self._loop = in_python(calls) if library is None else in_c(calls, library)

    def __call__(self, program: Program, bases: Any) -> None:
        """`bases`: an array of words, counted on already.

        Raises:
            CudaError: which of how many steps failed, and what the driver said.
        """
        done, status = self._loop(program, bases)
        if status:
            count, kind = len(program.steps), Kind(program.steps[done].kind)
            name = f"{driver.IN_STREAMS[kind][0]}, step {done + 1} of {count},"
            driver.check(driver.library(), name, status)
