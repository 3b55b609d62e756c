"""`tune comm`: which method carries which message on this machine, measured where steps send them.

Sizes are the payloads of the captured decode batches with powers of two between, then those of
prompts; each candidate is right before it is timed, and turns are taken forwards and backwards. A
timing that scatters is not used. The tiers land in a file that people read, edit and pin
(`comm.plan_file`); ranks of a layout follow it from the next start on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from metainfer.comm.driver import QUEUES
from metainfer.comm.peers import Place
from metainfer.comm.plan_file import Key, PlanFile, read, retune, write
from metainfer.comm.plan_tiers import Bucket, Sample, Tier, decode_buckets, make_tiers
from metainfer.comm.request import ELEMENT_BYTES, Op
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.engine.machine import open_machine
from metainfer.engine.rank import facts_of, tiers_path
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved
from metainfer.workers.ranks import ProcessGroup

RANK = "metainfer.bench.collectives_rank:CollectivesRank"
PROMPTS = (1 << 20, 4 << 20, 16 << 20)
SAMPLES, MOST_SAMPLES, NOISY = 7, 21, 0.1
CALLS = 20


class Group(Protocol):
    """What is measured with: every rank's answer to a call, in rank order."""

    def call(self, method: str, *arguments: object) -> list[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesOptions:
    """`seconds`: how long to measure, after which every size has what it has; `keep`: a file."""

    seconds: float = 20.0
    keep: bool = True


def run(intent: Intent, options: CollectivesOptions, log: Callable[[str], None]) -> dict[str, Any]:
    """``{"file", "tiers", "rows", "refused", "kept"}``.

    Raises:
        UsageError: the layout has no ranks that send each other anything.
        RefusedError, GroupError: it cannot be planned, or its ranks do not start.
    """
    machine = open_machine(intent.platform)
    resolved = machine.resolve(open_model(intent.model), intent)
    layout = resolved.plan.layouts[0]
    groups = Place(layout, 0).groups()
    if not groups:
        raise UsageError(
            f"layout {layout.name} has no ranks that send each other anything.",
            "Ask for one that has: --parallel tp2.",
        )
    facts = [facts_of(intent, resolved)] * layout.ranks
    log(f"{layout.ranks} ranks")
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    tiers: dict[Key, tuple[Tier, ...]] = {}
    with ProcessGroup.spawn(
        RANK,
        layout.ranks,
        facts=facts,
        start_s=600.0,
        environ=lambda rank: QUEUES,
    ) as group:
        share = options.seconds / (len({len(g) for g in groups.values()}) * 2)
        for role, members in {len(g): (r, g) for r, g in groups.items()}.values():
            for op in (Op.ALL_REDUCE, Op.ALL_GATHER):
                log(f"{op} over {len(members)} ranks")
                kind = resolved.plan.model.dtype
                sizes = buckets(resolved)
                bench = Bench(group, role, op, kind, sizes, share)
                bench.measure()
                rows += bench.rows(len(members))
                refused |= bench.refused
                tiers[op.value, len(members), kind] = make_tiers(sizes, bench.timings)
    path = tiers_path(machine.fingerprint)
    new = PlanFile(
        fingerprint=machine.fingerprint,
        machine=f"{layout.ranks} x {resolved.plan.device}, layout {layout.name}",
        tiers=tiers,
        refused=refused,
    )
    old, warnings = read(path, machine.fingerprint)
    for warning in warnings:
        log(warning)
    if old is not None:
        new = retune(old, _joined(old, new))
    if options.keep:
        write(path, new)
    return {
        "file": str(path),
        "kept": options.keep,
        "tiers": [
            {"op": key[0], "world": key[1], "dtype": key[2], **_plain(tier)}
            for key, found in new.tiers.items()
            for tier in found
        ],
        "rows": rows,
        "refused": dict(new.refused),
    }


def buckets(resolved: Resolved) -> tuple[Bucket, ...]:
    """The payloads that steps of a plan send, in ascending order."""
    plan, costs = resolved.plan, resolved.arch.costs()
    hidden = costs.hidden if costs is not None else 4096
    running = resolved.sizes.slots
    batches = plan.graph_buckets or [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= running]
    depth = plan.draft.depth
    found = list(decode_buckets(batches, hidden, plan.model.dtype, (0, depth) if depth else (0,)))
    chunk = plan.limits.step_tokens * hidden * ELEMENT_BYTES[plan.model.dtype]
    most = max(bucket.bytes for bucket in found)
    found += [Bucket(bytes=n) for n in sorted({*PROMPTS, chunk}) if most < n <= chunk]
    return tuple(found)


class Bench:
    """One op of one kind of group, at every size, over `seconds`."""

    def __init__(
        self,
        group: Group,
        role: str,
        op: Op,
        dtype: str,
        sizes: Sequence[Bucket],
        seconds: float,
    ) -> None:
        self._group, self._role, self._op, self._dtype = group, role, op, dtype
        self._sizes, self._seconds = sizes, seconds
        self.timings: dict[str, dict[int, Sample]] = {}
        self.refused: dict[str, str] = {}
        self._noisy: set[tuple[str, int]] = set()

    def measure(self) -> None:
        """Check every candidate, then time those that are right, in turns."""
        share = self._seconds / len(self._sizes)
        for bucket in self._sizes:
            count = bucket.bytes // ELEMENT_BYTES[self._dtype]
            asked = (self._op.value, count, self._dtype)
            methods: Any = self._group.call("methods", self._role, *asked)[0]
            able = [name for name in methods if self._right(name, asked)]
            found = self._turns(able, asked, share)
            for name, values in found.items():
                middle = statistics.median(values)
                mad = statistics.median(abs(value - middle) for value in values)
                if mad > NOISY * middle and len(values) >= MOST_SAMPLES:
                    self._noisy.add((name, bucket.bytes))
                    continue
                self.timings.setdefault(name, {})[bucket.bytes] = Sample(us=middle, mad=mad)

    def rows(self, world: int) -> list[dict[str, Any]]:
        """Every timing, and those that scatter."""
        found = [
            {"op": self._op.value, "world": world, "bytes": size, "method": name,
             "us": sample.us, "mad": sample.mad, "noisy": False}
            for name, timed in self.timings.items()
            for size, sample in timed.items()
        ]  # fmt: skip
        found += [
            {"op": self._op.value, "world": world, "bytes": size, "method": name, "noisy": True}
            for name, size in sorted(self._noisy)
        ]
        return found

    def _right(self, name: str, asked: tuple[str, int, str]) -> bool:
        if name in self.refused:
            return False
        said = self._group.call("check", self._role, name, *asked)
        for rank, wrong in enumerate(said):
            if wrong:
                self.refused[name] = f"rank {rank}, {asked[0]} of {asked[1]} elements: {wrong}"
                self.timings.pop(name, None)
                return False
        return True

    def _turns(
        self, names: Sequence[str], asked: tuple[str, int, str], seconds: float
    ) -> dict[str, list[float]]:
        """Samples of each candidate: the slowest rank's, forwards and backwards in turn."""
        found: dict[str, list[float]] = {name: [] for name in names}
        end = time.monotonic() + seconds
        for turn in range(MOST_SAMPLES):
            if turn >= SAMPLES and time.monotonic() > end:
                break
            for name in names if turn % 2 == 0 else reversed(names):
                each: Any = self._group.call("time", self._role, name, *asked, CALLS)
                found[name].append(max(each))
        return found


def _joined(old: PlanFile, new: PlanFile) -> PlanFile:
    """What was measured now, beside what was measured of other messages."""
    return PlanFile(
        fingerprint=new.fingerprint,
        machine=new.machine,
        tiers={**old.tiers, **new.tiers},
        refused=new.refused,
    )


def _plain(tier: Tier) -> dict[str, Any]:
    return {
        "bytes_from": tier.bytes_from,
        "method": tier.method,
        "us": tier.us,
        "second": tier.second,
        "pinned": tier.pinned,
        "why": tier.why,
    }
