"""A small world for scheduler tests: caches, requests, and a loop on the null device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from metainfer.core.clock import VirtualClock
from metainfer.core.errors import InternalError, RequestError
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.core.step import NO_ADAPTER, RequestOutput, StepPlan
from metainfer.executor.null import NullCost, NullDevice, straight_line
from metainfer.kv.book import audit
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.form import plain
from metainfer.kv.book.manager import KVManager
from metainfer.kv.book.spec import CacheSpec, GroupKind, GroupSpec, Rewind, form_groups
from metainfer.scheduler.config import SchedulerConfig
from metainfer.scheduler.domain import Domain
from metainfer.scheduler.scheduler import Scheduler
from metainfer.scheduler.sequence import Sequence

VOCAB = 50


ENTRY, ROW = plain("test", 8, "uint8"), plain("test", 64, "uint8")


def paged(layer: int, ratio: int = 1, name: str = "kv") -> CacheSpec:
    return CacheSpec(
        layer=layer,
        name=name,
        kind=GroupKind.PAGED,
        form=ENTRY,
        tokens_per_entry=ratio,
    )


def window(layer: int, tokens: int) -> CacheSpec:
    return CacheSpec(layer=layer, name="swa", kind=GroupKind.WINDOW, form=ENTRY, window=tokens)


def snapshot(layer: int) -> CacheSpec:
    return CacheSpec(
        layer=layer,
        name="online",
        kind=GroupKind.STATE,
        form=ROW,
        rows=1,
        rewind=Rewind.SNAPSHOT,
    )


def cursor(layer: int, *, clean: int = 0, ring: int = 8) -> CacheSpec:
    return CacheSpec(
        layer=layer,
        name=f"ring{clean}",
        kind=GroupKind.STATE,
        form=ROW,
        rows=1,
        rewind=Rewind.CURSOR,
        ring_tokens=ring,
        clean_tokens=clean,
    )


SHAPES: dict[str, tuple[CacheSpec, ...]] = {
    "dense": (paged(0),),
    "window": (window(0, 11),),
    "swa": (paged(0), window(1, 9)),
    "narrow": (paged(0), window(1, 3)),
    "state": (snapshot(0),),
    "hybrid": (paged(0), snapshot(1)),
    "grids": (paged(0), window(1, 9), snapshot(2)),
    "v4": (paged(0, 4), paged(1, 8), window(2, 13), cursor(3), cursor(4, clean=8), snapshot(5)),
}


def groups_of(shape: str, page: int, snapshot_tokens: int = 0) -> tuple[GroupSpec, ...]:
    """The groups of a shape; "grids" has another page in each group and a state between them."""
    groups = form_groups(SHAPES[shape], page_tokens=page, snapshot_tokens=snapshot_tokens)
    if shape != "grids":
        return groups
    return (
        replace(groups[0], page_tokens=page // 2),
        groups[1],
        replace(groups[2], snapshot_tokens=page * 3 // 2),
    )


def sizes_of(
    groups: tuple[GroupSpec, ...],
    *,
    pages: int,
    slots: int,
    snapshots: int = 6,
    domains: int = 1,
) -> CacheSizes:
    """The same page count in every paged group."""
    return CacheSizes(
        groups=groups,
        pages=tuple(0 if g.kind is GroupKind.STATE else pages for g in groups),
        snapshots=tuple(snapshots if g.kind is GroupKind.STATE else 0 for g in groups),
        slots=slots,
        domains=domains,
    )


def request(
    name: str, prompt: list[int] | tuple[int, ...], max_tokens: int = 8, **more: object
) -> Request:
    own = ("priority", "cache_salt", "eos_token_ids", "adapter")
    fields = {k: more.pop(k) for k in own if k in more}
    more = {"temperature": 0.0, **more}
    params = SamplingParams(max_tokens=max_tokens, **more)  # type: ignore[arg-type]
    return Request(name, tuple(prompt), params, **fields)  # type: ignore[arg-type]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token: int | None = None
    rows: list[tuple[int, float]] = field(default_factory=list)
    cached: int = 0
    error: str = ""
    times: list[float] = field(default_factory=list)


class World:
    """Scheduler, accounts and null device; `step` advances, audits, and collects answers."""

    def __init__(
        self,
        sizes: CacheSizes,
        config: SchedulerConfig,
        *,
        drafts: object = None,
        proposer: object = None,
        late: bool = False,
        caching: bool = True,
        contents: bool = True,
        cost: NullCost | None = None,
        audited: bool = True,
    ) -> None:
        self.sizes, self.config, self.late, self.audited = sizes, config, late, audited
        self.clock = VirtualClock(1.0)
        self.kv = [
            KVManager(sizes, domain=d, namespace="m", caching=caching) for d in range(sizes.domains)
        ]
        self.scheduler = Scheduler(config, self.kv, self.clock, drafts)  # type: ignore[arg-type]
        self.device = NullDevice(
            VOCAB,
            contents=contents,
            cost=cost,
            clock=self.clock,
            proposer=proposer,  # type: ignore[arg-type]
        )
        self.device.start(sizes)
        preempt = self.scheduler._preempt

        def checked(domain: Domain, seq: Sequence) -> None:
            self._no_draft_holds_a_page(domain, seq)
            preempt(domain, seq)

        self.scheduler._preempt = checked  # type: ignore[method-assign]
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, Request] = {}
        self.plans: list[StepPlan] = []
        self.keep_plans = False
        self._idle = 0  # turns in a row without a plan; late results may cost one

    def add(self, item: Request) -> RequestError | None:
        try:
            self.scheduler.add(item)
        except RequestError as error:
            return error
        self.requests[item.request_id] = item
        self.answers[item.request_id] = Answer()
        return None

    def cancel(self, name: str) -> None:
        output = self.scheduler.cancel(name)
        if output is not None:
            self._take(output)

    def step(self) -> bool:
        """One turn of the engine's loop; False when there is nothing left to do."""
        scheduler, device = self.scheduler, self.device
        plan = scheduler.schedule()
        if plan is not None:
            for segments in zip(*(segment.ranks for segment in plan.segments), strict=True):
                assert sum(rank.tokens for rank in segments) <= self.config.step_tokens
            for grant in plan.pages:  # device tables end there
                reach = self.sizes.groups[grant.group].pages_for(self.config.max_context)
                assert grant.first + len(grant.pages) <= reach
            if self.keep_plans:
                self.plans.append(plan)
            device.submit(plan)
        depth = 1 if self.late and plan is not None else 0
        while scheduler.awaiting > depth:
            for output in scheduler.commit(device.collect()):
                self._take(output)
        if self.audited:
            scheduler.audit()
        if plan is None and scheduler.has_work and not self.late:
            raise InternalError("stuck: work is left, and nothing is planned")
        self._idle = self._idle + 1 if plan is None and scheduler.has_work else 0
        if self._idle > 1:
            raise InternalError("stuck: no result is awaited, and nothing is planned")
        return scheduler.has_work

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise InternalError(f"not finished after {limit} steps")
        for manager in self.kv:
            audit.check_idle(manager)

    @staticmethod
    def _no_draft_holds_a_page(domain: Domain, victim: Sequence) -> None:
        """Before anything is preempted, every page that only drafts wanted has come back."""
        for seq in (*domain.running, victim):
            if seq.account is None:
                continue
            assert seq.hold is None or not seq.hold.drafts
            for group, table in zip(domain.kv.paged, seq.account.tables, strict=True):
                assert len(table) <= group.pages_for(max(seq.planned, seq.account.length))

    def _take(self, output: RequestOutput) -> None:
        answer = self.answers[output.request_id]
        assert answer.finish is None, "output after the last one"
        assert output.index == len(answer.tokens)
        answer.tokens += output.tokens
        answer.rows += [(row.token, row.logprob) for row in output.prompt_logprobs]
        answer.finish, answer.stop_token = output.finish, output.stop_token
        answer.cached, answer.error = output.cached_tokens, output.error
        answer.times += [self.clock.now()] * len(output.tokens)

    def reference(self, name: str) -> list[int]:
        item = self.requests[name]
        place = list(self.config.adapters).index(item.adapter) if item.adapter else NO_ADAPTER
        return straight_line(item, self.sizes.groups, VOCAB, self.config.max_context, place)

    def check(self) -> None:
        """Every finished answer equals the straight-line one; a cancelled one is its beginning."""
        for name, answer in self.answers.items():
            want = self.reference(name)
            if answer.finish in (FinishReason.CANCELLED, FinishReason.ERROR):
                want = want[: len(answer.tokens)]
            assert answer.finish is not None, f"{name} never ended"
            assert answer.tokens == want, f"{name}: {answer.tokens} != {want}"


def config_of(**changes: object) -> SchedulerConfig:
    fields: dict[str, object] = {
        "max_context": 100,
        "max_running": 4,
        "step_tokens": 32,
        "mixed_prefill_tokens": 8,
    }
    return SchedulerConfig(**(fields | changes))  # type: ignore[arg-type]


def world_of(
    shape: str = "dense", *, pages: int = 60, slots: int = 4, late: bool = False, **changes: object
) -> World:
    domains = int(changes.pop("domains", 1))  # type: ignore[call-overload]
    drafts, proposer = changes.pop("drafts", None), changes.pop("proposer", None)
    sizes = sizes_of(groups_of(shape, 8), pages=pages, slots=slots, domains=domains)
    made = World(
        sizes,
        config_of(max_running=slots, **changes),
        late=late,
        drafts=drafts,
        proposer=proposer,
        caching=True,
    )
    made.keep_plans = True
    return made
