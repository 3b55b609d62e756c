"""The engine: one loop turn is schedule, launch, read, commit. Knows tokens, not text; no sockets.

`start` resolves the plan, loads, warms up and runs a step at the advertised limits; only then is
the engine ready. Everything it decided is in `plan_json`.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import msgspec

from metainfer.core.errors import InternalError, RequestError
from metainfer.core.intent import Intent
from metainfer.core.plan import Plan
from metainfer.core.request import FinishReason, Request
from metainfer.core.step import Phase, RequestOutput, StepPlan
from metainfer.engine.devices import open_executor
from metainfer.engine.drift import drift
from metainfer.engine.grammars import GrammarDesk, open_library
from metainfer.engine.limit import try_limit
from metainfer.engine.machine import Machine, open_machine
from metainfer.engine.protocol import EngineInfo, EngineStats, Fault, Guards, Progress
from metainfer.engine.recorder import FlightRecorder
from metainfer.engine.stacks import StackTimer
from metainfer.engine.steps import Steps, guard_trace
from metainfer.engine.verdicts import status
from metainfer.executor.protocol import OneDevice, ServingExecutor
from metainfer.kernels.compiles import COMPILED_LATE, CompileWatch
from metainfer.kv.book.manager import KVManager
from metainfer.planner.drafts import MODEL, NGRAM
from metainfer.planner.opening import OpenedModel, open_model
from metainfer.planner.report import plan_document
from metainfer.planner.resolve import Resolved
from metainfer.platform.fingerprint import fingerprint
from metainfer.scheduler.config import SchedulerConfig
from metainfer.scheduler.ngram import NgramDrafts
from metainfer.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from metainfer.comm.backends.emulated import Waited
    from metainfer.comm.emulated_ranks import EmulatedRanks
    from metainfer.kernels.table import Trace

OnProgress = Callable[[Progress], None]
OnFault = Callable[[Fault], None]
OnStep = Callable[[StepPlan, float], None]
"""A plan whose result was read, and seconds of the whole turn."""

UNWATCHED = Guards(hang_after_s=0.0)
"""For engines that no server watches: a debugger may stop in a step for as long as it likes."""


class Engine:
    """One model on one machine. Not thread-safe: whoever calls `step` owns it."""

    def __init__(
        self,
        intent: Intent,
        on_progress: OnProgress = lambda progress: None,
        *,
        trace: Trace | None = None,
        machine: Machine | None = None,
        guards: Guards = UNWATCHED,
        recorder: FlightRecorder | None = None,
        on_fault: OnFault = lambda fault: None,
    ) -> None:
        """`machine`: the one to run on, when it was opened before; else this one is opened.
        `on_fault` is told what broke while the engine goes on."""
        self.intent = intent
        self._guards = guards
        self._recorder = recorder or FlightRecorder()
        self._on_fault = on_fault
        self._machine = machine
        self._on_progress = on_progress
        self._trace = trace
        self._phases: list[tuple[str, float]] = []
        self._scheduler: Scheduler | None = None
        self._executor: ServingExecutor | None = None
        self._device: OneDevice | None = None  # the executor, where it is no group of ranks
        self._desk = GrammarDesk(None)
        self._phase_name = ""
        self._steps: Steps | None = None
        self._drawn: Counter[str] = Counter()  # of `_draws`, before ready
        self.compiles = CompileWatch(self._compiled_late)
        self.resolved: Resolved | None = None
        self.on_step: OnStep | None = None

    # -- start -------------------------------------------------------------------------------------

    def start(self) -> EngineInfo:
        """Bring everything up; returns what a server must know.

        Raises:
            UserError: the machine, the model or a wish stands against it.
        """
        with self._phase("model files"):
            model = open_model(self.intent.model, adapters=self.intent.adapters)
        with self._phase("machine"):
            machine = self._machine or open_machine(self.intent.platform)
        with self._phase("plan"):
            # Before the long imports: what the plan refuses is refused within a second. What runs
            # nowhere is not first told to find more memory.
            if (lacking := model.facts.refusal()) is not None:
                raise lacking
            first = machine.resolve(model, self.intent)
            if (refusal := first.refusal()) is not None:
                raise refusal
            machine.recall(first.plan.model.dtype)
            drifted = drift(fingerprint(machine.facts)) if self._machine is None else []
        with self._phase("torch"):
            import torch  # noqa: F401 - timed apart: it is the longest import
        with self._phase("qualify kernels"):
            resolved = machine.resolve_proven(model, self.intent, self._note)
            self.resolved = resolved
        trace = guard_trace(self._guards.nan_guard, resolved, self._trace)
        with self._phase("weights"):
            self._executor = open_executor(
                resolved, model, machine, self.intent, note=self._note, trace=trace
            )
            if isinstance(self._executor, OneDevice):
                self._device = self._executor
                self._device.nan_guard = self._guards.nan_guard  # ranks look at logits
        with self._phase("warm-up"):
            self._executor.warm(self._note)
        self._open_grammars(self._executor, model, resolved.plan)
        self._open_loop(self._executor, resolved, model)
        plan = resolved.plan
        if self._guards.try_limit:
            with self._phase("a request at the limit"):
                try_limit(self, plan.limits.max_context, resolved.arch.vocab_size, self._note)
            slots = tuple(range(plan.kv_domains * resolved.sizes.slots))
            self._executor.execute(StepPlan(0, (), released=slots))
            self._open_loop(self._executor, resolved, model)  # nothing of it is left
        self._drawn = Counter(self._draws)
        self.compiles.open()
        return EngineInfo(
            model=model.source.reference,
            vocab_size=resolved.arch.vocab_size,
            max_context=plan.limits.max_context,
            kv_tokens=plan.kv_tokens,
            max_running=plan.limits.max_running,
            eos_token_ids=model.eos_token_ids,
            plan={
                **plan_document(resolved),
                "verification": status(machine.store, plan),
                "drift": drifted,
            },
            start_phases=tuple(self._phases),
            held_bytes=self.held_bytes,
            links=machine.facts.links,
        )

    def _open_loop(self, executor: ServingExecutor, resolved: Resolved, model: OpenedModel) -> None:
        """A scheduler and its steps, over caches in which nothing is kept."""
        self._scheduler = self._make_scheduler(resolved, model)
        self._steps = Steps(
            executor,
            self._scheduler,
            self._recorder,
            StackTimer(self._guards.hang_after_s),
            self._on_fault,
            ahead=executor if resolved.plan.overlap else None,
        )

    def _open_grammars(self, executor: ServingExecutor, model: OpenedModel, plan: Plan) -> None:
        """Grammars need the vocabulary's bytes, the only thing the engine knows of text."""
        with self._phase("grammars"):
            library, why = open_library(
                plan.grammar, model.source.reference, plan.model.vocab_size, model.eos_token_ids
            )
        self._desk = GrammarDesk(library, why)
        if library is not None:
            executor.use_grammars(library.open)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Report a start-up phase with its seconds."""
        self._phase_name = name
        self._on_progress(Progress(name))
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        self._phases.append((name, seconds))
        self._on_progress(Progress(name, seconds))

    def _compiled_late(self, text: str) -> None:
        self._recorder.note(COMPILED_LATE, text)
        self._on_fault(Fault(COMPILED_LATE, text))

    def _note(self, detail: str) -> None:
        self._on_progress(Progress(self._phase_name, None, detail))

    def _make_scheduler(self, resolved: Resolved, model: OpenedModel) -> Scheduler:
        plan = resolved.plan
        limits = plan.limits
        namespace = f"{model.source.reference}:{model.seed}:{plan.model.dtype}"
        managers = [
            KVManager(resolved.sizes, domain=domain, namespace=namespace, caching=plan.prefix_cache)
            for domain in range(plan.kv_domains)
        ]
        config = SchedulerConfig(
            max_context=limits.max_context,
            max_running=resolved.sizes.slots,
            step_tokens=limits.step_tokens,
            mixed_prefill_tokens=limits.mixed_prefill_tokens,
            max_waiting=limits.max_waiting,
            max_drafts=plan.draft.depth,
            model_drafts=plan.draft.method == MODEL,
            adaptive_drafts=plan.draft.adaptive,
            split_phases=plan.layouts[0].splits_phases,
            prefill_from=plan.prefill_from,
            layouts={Phase(phase): layout for phase, layout in plan.phase_layout.items()},
            adapters={adapter.name: adapter.digest for adapter in plan.adapters},
        )
        source = NgramDrafts() if plan.draft.method == NGRAM else None
        return Scheduler(config, managers, drafts=source)

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. A missing seed is drawn here, once, so that every rank sees the same.

        One whose grammar has to be compiled joins the queue in a later `step`.

        Raises:
            RequestError: it cannot run; says why.
        """
        resolved = self._ready()
        vocab = resolved.arch.vocab_size
        request.params.check(vocab)
        for token in (min(request.prompt, default=0), max(request.prompt, default=0)):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"token id {token} is out of range; the vocabulary has {vocab} tokens.",
                    param="prompt",
                )
        if request.params.seed is None and not request.params.greedy:
            params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, params=params)
        if request.params.grammar is not None:
            self.scheduler.check(request)
        if not self._desk.hold(request):
            self.scheduler.add(request)

    def cancel(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """End requests now; their pages are free before the next step."""
        ended = []
        for request_id in request_ids:
            output = self.scheduler.cancel(request_id)
            if self._desk.waits(request_id):
                output = RequestOutput(request_id, (), finish=FinishReason.CANCELLED)
            self._desk.forget(request_id)
            ended.append(output)
        self._rest_if_idle()
        return [output for output in ended if output is not None]

    def step(self) -> tuple[list[RequestOutput], EngineStats]:
        """One turn of the loop: at most one output per request.

        Where the plan says `overlap`, the next step is launched before this turn's was read.

        Raises:
            InternalError: an invariant broke; the engine must not go on.
        """
        assert self._steps is not None
        begin = time.perf_counter()
        outputs = self._admit_ready()
        plan, came = self._steps.turn()
        outputs += came
        if plan is not None and self.on_step is not None:
            self.on_step(plan, time.perf_counter() - begin)
        for output in outputs:
            if output.finish is not None:
                self._desk.forget(output.request_id)
        self._rest_if_idle()
        return outputs, self.stats()

    def _rest_if_idle(self) -> None:
        if self._steps is not None and not self.has_work:
            self._steps.rest()

    def _admit_ready(self) -> list[RequestOutput]:
        """Queue what waited for its grammar; the outputs end what cannot be queued any more."""
        ended = []
        for request, error in self._desk.ready(idle=not self.scheduler.has_work):
            try:
                if not error:
                    self.scheduler.add(request)
                    continue
            except RequestError as refusal:
                error = str(refusal)
            ended.append(
                RequestOutput(request.request_id, (), finish=FinishReason.ERROR, error=error)
            )
        return ended

    def stats(self) -> EngineStats:
        reading = self.scheduler.stats()
        counters, waited = reading.counters, self.waited
        return EngineStats(
            running=reading.running,
            waiting=reading.waiting + len(self._desk),
            kv_used=reading.kv_used,
            steps=counters.steps,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            cache_query_tokens=counters.cache_query_tokens,
            cache_hit_tokens=counters.cached_tokens,
            longest_decode_gap_s=reading.longest_decode_gap_s,
            last_step_s=self._steps.last_s if self._steps is not None else 0.0,
            drafted_tokens=counters.drafted_tokens,
            accepted_drafts=counters.accepted_drafts,
            draft_alarm=reading.draft_alarm,
            running_adapters=reading.running_adapters,
            waiting_adapters=reading.waiting_adapters,
            draft_depth=reading.draft_depth,
            draft_gain=reading.draft_gain,
            cache_alarms=reading.cache_alarms,
            non_finite=counters.non_finite,
            abandoned_steps=counters.abandoned,
            emulated_calls=waited.calls if waited is not None else 0,
            overlapped_steps=self._steps.overlapped if self._steps is not None else 0,
            step_waits=dict(self._steps.waits) if self._steps is not None else {},
            step_draws=dict(self._draws - self._drawn),
            emulated_wait_s=waited.us / 1e6 if waited is not None else 0.0,
        )

    @property
    def _draws(self) -> Counter[str]:
        """How the executor's draws were launched, warm-up and trial with the rest."""
        return Counter(self._executor.draws if self._executor is not None else {})

    @property
    def waited(self) -> Waited | None:
        """What emulated collectives took so far; None where none is emulated."""
        return self._emulated.waited if self._emulated is not None else None

    @property
    def emulated_paths(self) -> dict[str, float]:
        """Share of emulated collectives by the backend and algorithm that their price is of."""
        return self._emulated.describe() if self._emulated is not None else {}

    @property
    def _emulated(self) -> EmulatedRanks | None:
        return self._device.emulated if self._device is not None else None

    @property
    def has_work(self) -> bool:
        scheduler = self._scheduler
        return scheduler is not None and (scheduler.has_work or len(self._desk) > 0)

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise InternalError("the engine has not started")
        return self._scheduler

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes in fact held, by the kinds of the plan's memory ledger."""
        return self._executor.held_bytes if self._executor is not None else {}

    def eager(self) -> AbstractContextManager[None]:
        """Inside, nothing replays a captured step; ranks in other processes stay as they are."""
        return self._device.eager() if self._device is not None else nullcontext()

    def close(self) -> None:
        """Let go of the device."""
        self.compiles.close()
        self._desk.close()
        if self._executor is not None:
            self._steps = None
            self._executor.close()
            self._executor = self._device = None

    def _ready(self) -> Resolved:
        if self.resolved is None or self._scheduler is None:
            raise InternalError("the engine has not started")
        return self.resolved
