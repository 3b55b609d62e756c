"""The real scheduler and the real account of pages on a virtual clock.

Nothing here decides: requests go to `Scheduler` as the engine's loop would hand them over, each
plan costs what `Price` says, and the clock moves by that. The way through the server is two
numbers: requests pass it one after the other, `request_s` each, so that those of one moment reach
the engine apart; tokens cost `token_s` each.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from metainfer.core.clock import VirtualClock
from metainfer.core.errors import RefusedError, RequestError
from metainfer.core.request import Request, SamplingParams
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.manager import KVManager
from metainfer.planner.amounts import Price
from metainfer.planner.steps import StepCost
from metainfer.scheduler.config import DraftSource, SchedulerConfig
from metainfer.scheduler.scheduler import Scheduler
from metainfer.simulator.device import AnyDrafts, PricedDevice
from metainfer.simulator.outcome import Served, summary
from metainfer.simulator.workload import Release, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """An engine without its device. `sizes`: of one KV domain, `domains` of which there are."""

    config: SchedulerConfig
    sizes: CacheSizes
    domains: int
    cost: StepCost
    price: Price
    caching: bool = True
    request_s: float = 0.0
    token_s: float = 0.0

    def scheduler(self, clock: VirtualClock, drafts: DraftSource | None = None) -> Scheduler:
        sizes = replace(self.sizes, domains=self.domains)
        accounts = [
            KVManager(sizes, domain=i, namespace="simulated", caching=self.caching)
            for i in range(self.domains)
        ]
        return Scheduler(self.config, accounts, clock, drafts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`served`: in the order of the workload's jobs."""

    served: tuple[Served, ...]
    steps: int
    preemptions: int
    kv_used: float
    query_tokens: int
    hit_tokens: int
    drafted: int
    accepted: int
    longest_gap_s: float
    phase_steps: dict[str, int]
    phase_s: dict[str, float]

    def to_json(self) -> dict[str, object]:
        query = self.query_tokens
        return {
            **summary(self.served),
            "steps": self.steps,
            "preemptions": self.preemptions,
            "kv_used_max": self.kv_used,
            "hit_rate": self.hit_tokens / query if query else None,
            "drafted_tokens": self.drafted,
            "accepted_drafts": self.accepted,
            "longest_decode_gap_s": self.longest_gap_s,
            "phase_steps": self.phase_steps,
            "phase_s": self.phase_s,
        }


class Simulation:
    """One workload on one world. `acceptance`: see `PricedDevice`; without drafts it is idle."""

    def __init__(
        self, world: World, workload: Workload, *, acceptance: float = 0.0, seed: int = 0
    ) -> None:
        self.clock = VirtualClock()
        drafting = world.config.max_drafts and not world.config.model_drafts
        self.scheduler = world.scheduler(self.clock, AnyDrafts() if drafting else None)
        self.device = PricedDevice(
            world.cost,
            world.price,
            self.clock,
            acceptance=acceptance,
            seed=seed,
            token_s=world.token_s,
        )
        self._world, self._workload = world, workload
        self._release = Release(workload)
        self._served: dict[int, Served] = {}
        self._answers: dict[int, list[int]] = {}
        self._coming: list[tuple[float, int, tuple[int, ...]]] = []  # heap, by time at the engine
        self._kv_used = 0.0
        self._gap = 0.0
        self._passed = 0.0  # when the server is done with the latest request

    def run(self) -> Outcome:
        """Serve everything.

        Raises:
            RefusedError: a request cannot run in this world; says which and why.
        """
        scheduler, clock = self.scheduler, self.clock
        while True:
            self._arrive()
            plan = scheduler.schedule()
            if plan is None:
                times = [at for at in (self._release.next_at(), self._next()) if at is not None]
                if not times:
                    break
                clock.advance(max(0.0, min(times) - clock.now()))
                continue
            self._kv_used = max(self._kv_used, *(domain.kv.usage() for domain in scheduler.domains))
            self._commit(self.device.execute(plan))
        counters = scheduler.counters
        return Outcome(
            tuple(self._served[i] for i in sorted(self._served)),
            counters.steps,
            counters.preemptions,
            self._kv_used,
            counters.cache_query_tokens,
            counters.cached_tokens,
            counters.drafted_tokens,
            counters.accepted_drafts,
            self._gap,
            dict(self.device.steps),
            dict(self.device.busy_s),
        )

    def _next(self) -> float | None:
        return self._coming[0][0] if self._coming else None

    def _arrive(self) -> None:
        """Hand over whatever has reached the engine by now."""
        now = self.clock.now()
        for index, at, prompt in self._release.ready(now):
            self._served[index] = Served(at, len(prompt))
            self._answers[index] = []
            self._passed = max(at, self._passed) + self._world.request_s
            heapq.heappush(self._coming, (self._passed, index, prompt))
        while self._coming and self._coming[0][0] <= now:
            _, index, prompt = heapq.heappop(self._coming)
            params = SamplingParams(
                temperature=0.0, max_tokens=self._workload.jobs[index].output, ignore_eos=True
            )
            try:
                self.scheduler.add(Request(str(index), prompt, params))
            except RequestError as error:
                raise RefusedError(
                    f"request {index} of the workload cannot run: {error.cause}",
                    error.remedy or "Change the workload, or --context and --concurrency.",
                    code="workload_refused",
                ) from None

    def _commit(self, result: object) -> None:
        now = self.clock.now()
        for output in self.scheduler.commit(result):  # type: ignore[arg-type]
            index = int(output.request_id)
            served = self._served[index]
            if output.tokens:
                if served.times:
                    self._gap = max(self._gap, now - served.times[-1])
                served.times.append(now)
                served.counts.append(len(output.tokens))
                self._answers[index] += output.tokens
            if output.finish is not None:
                served.cached = output.cached_tokens
                served.error = output.error
                self._release.ended(index, self._answers.pop(index), now)


def simulate(
    world: World, workload: Workload, *, acceptance: float = 0.0, seed: int = 0
) -> Outcome:
    """Serve `workload` in `world`. Raises as `Simulation.run`."""
    return Simulation(world, workload, acceptance=acceptance, seed=seed).run()
