"""Sends attacks, several at a time, and keeps what came back."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hostile_requests import Attack

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
ANSWER_S = 30.0


@dataclass
class Outcome:
    """`statuses`: (family, status) -> how many. `faults`: what must not be, with the attack."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        """Take in what came of more attacks."""
        self.statuses += other.statuses
        self.faults += other.faults
        self.seconds += other.seconds

    def note(self, number: int, attack: Attack, received: bytes, silent: bool) -> None:
        found = [int(code) for code in STATUS.findall(received)]
        for code in found or [0]:
            self.statuses[attack.family, code] += 1
        for code in found:
            if code >= 500:
                self.faults.append(f"{number} {attack.family}: {code} {received[-300:]!r}")
        if silent:
            self.faults.append(f"{number} {attack.family}: no answer within {ANSWER_S:g} s")


async def _one(port: int, attack: Attack) -> tuple[bytes, bool]:
    """What came back, and whether an answer that was due did not come."""
    received = bytearray()
    silent = False
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        return f"HTTP/1.1 599 {error}".encode(), False

    async def read() -> None:
        while part := await reader.read(1 << 16):
            received.extend(part[-4096:] if len(received) > 1 << 16 else part)

    reading = asyncio.ensure_future(read())
    try:
        with suppress(ConnectionError):
            writer.write(attack.data)
            await writer.drain()
            if attack.hold_s:
                for byte in attack.trickle:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(attack.hold_s / max(len(attack.trickle), 1))
            elif attack.leaves:
                await asyncio.sleep(0.01)
        if not attack.hold_s and not attack.leaves:
            await asyncio.wait((reading,), timeout=ANSWER_S)
            silent = not reading.done()
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await reading
        writer.transport.abort()
    return bytes(received), silent


async def send(port: int, wanted: Sequence[Callable[[], Attack]], at_once: int = 12) -> Outcome:
    """Send all of `wanted`."""
    outcome = Outcome()
    todo = iter(enumerate(wanted))

    async def worker() -> None:
        for number, make in todo:
            attack = make()
            outcome.note(number, attack, *await _one(port, attack))

    begin = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    outcome.seconds = time.monotonic() - begin
    return outcome
