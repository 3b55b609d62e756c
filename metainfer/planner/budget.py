"""What part of a device's memory a plan may use, what the cache gets of it, and what is left."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.errors import RefusedError
from metainfer.core.intent import Intent
from metainfer.core.plan import LayoutPlan, LedgerRow
from metainfer.core.verdict import Reason
from metainfer.planner import graphs
from metainfer.planner.fitting import DOES_NOT_FIT
from metainfer.planner.memory import MARGIN_PART, RESERVE_PART
from metainfer.planner.needs import MEASURED, Needs
from metainfer.platform.facts import CPU, Facts

UNKNOWN_MEMORY = "unknown_memory"

HOST_PART = 8
"""On a host the cache gets this part of memory, one over it (seed): the rest is others' too."""

UNBOUNDED = 1 << 50
"""Bytes that a cache may be asked for where the size of memory is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Memory of one device under `layout`. `sharing`: ranks that are processes of one host, and
    have its memory in equal parts; `needs`: what was measured here, if it holds for this layout.
    """

    intent: Intent
    facts: Facts
    layout: LayoutPlan
    sharing: int
    needs: Needs | None

    def of_cache(self, held: int) -> tuple[int, int | None]:
        """Bytes that the cache takes beside `held`, and the most it could be asked for.

        Raises:
            RefusedError: nothing is left (``does_not_fit``), or nobody knows (``unknown_memory``).
        """
        device = self.facts.device
        on_cpu = device.kind == CPU
        memory = device.memory_bytes
        if on_cpu and self.facts.host.memory_bytes is not None:
            memory = self.facts.host.memory_bytes // self.sharing
        whole = memory is None or (on_cpu and self.intent.memory_share is None)
        usable = memory if memory is None or whole else self._usable(memory)
        free = None if usable is None else usable - held
        if self.intent.kv_bytes is not None:
            most = None if memory is None else memory - held
            if most is not None and most <= 0 and usable is not None:
                raise self._too_large(held, usable)
            if most is not None and self.intent.kv_bytes > most:
                raise _asked_too_much(self.intent.kv_bytes, most)
            return self.intent.kv_bytes, UNBOUNDED if most is None else most
        if memory is None or usable is None or free is None:
            raise RefusedError(
                "the device's memory size is unknown, so the cache cannot be sized.",
                "Say it: --kv-memory 4GiB.",
                reasons=(Reason("memory", "the device's memory size is unknown"),),
                code=UNKNOWN_MEMORY,
            )
        if free <= 0:
            raise self._too_large(held, usable)
        return (min(memory // HOST_PART, free), free) if whole else (free, free)

    def rest(self, held: int) -> list[LedgerRow]:
        """Reserve and what is left over beside `held`, on a card whose memory is known."""
        memory = self.facts.device.memory_bytes
        if self.facts.device.kind == CPU or memory is None:
            return []
        left = memory - held
        kept = min(memory - self._usable(memory), left)  # an asked cache may reach into it
        known = self._measured_reserve
        if known is None:
            rows = [LedgerRow(item="allocator and context (seed)", kind="reserve", bytes=kept)]
        else:
            held_back = min(known, kept)
            item = f"allocator and context {MEASURED}"
            rows = [
                LedgerRow(item=item, kind="reserve", bytes=held_back),
                LedgerRow(item="margin (seed)", kind="free", bytes=kept - held_back),
            ]
        return [*rows, LedgerRow(item=graphs.FREE, kind="free", bytes=left - kept)]

    @property
    def _measured_reserve(self) -> int | None:
        """What the device and the allocator were measured to keep, unless a share was asked for."""
        asked = self.intent.memory_share is not None
        return None if asked or self.needs is None else self.needs.reserve_bytes

    def _usable(self, memory: int) -> int:
        """Bytes that weights, cache and the rest may take together: all but the measured reserve
        and `MARGIN_PART` beside it; else the share asked for, or all but a seed."""
        known, share = self._measured_reserve, self.intent.memory_share
        if known is not None:
            return memory - known - int(memory * MARGIN_PART)
        return int(memory * (1 - RESERVE_PART if share is None else share))

    def _too_large(self, held: int, usable: int) -> RefusedError:
        message = f"weights and activations need {held:,} B, {usable:,} B are usable"
        name, ranks = self.facts.device.name, self.layout.ranks
        where = f"one {name}" if ranks == 1 else f"each of {ranks} {name}"
        return RefusedError(
            f"{message} on {where}.",
            "Use fewer layers or smaller weights, or more or larger cards.",
            reasons=(Reason("memory", message, {"need": held, "have": usable}),),
            code=DOES_NOT_FIT,
        )


def _asked_too_much(asked: int, free: int) -> RefusedError:
    data = {"need": asked, "have": free}
    return RefusedError(
        f"--kv-memory asks for {asked:,} B, {free:,} B are free beside weights and activations.",
        f"Ask for at most {free:,} B.",
        reasons=(Reason("memory", f"{asked:,} B asked, {free:,} B free", data),),
        code=DOES_NOT_FIT,
    )
