"""One step with everything that may go wrong in it: recorded, watched, and survived where one
request is to blame.

A run that met NaN ends its request; where it came from is looked for before the pages go. A step
for which memory did not suffice is given up, and the scheduler tries its requests again. Anything
else ends the engine.
"""

from __future__ import annotations

import gc
import re
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from metainfer.core.errors import UsageError
from metainfer.core.step import NON_FINITE, OUT_OF_MEMORY, RequestOutput, StepPlan
from metainfer.engine.protocol import Fault
from metainfer.engine.recorder import FlightRecorder, hashed
from metainfer.engine.stacks import StackTimer
from metainfer.executor.protocol import Executor, LateExecutor, NanGuard, OneDevice
from metainfer.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from metainfer.kernels.table import Trace
    from metainfer.planner.resolve import Resolved

_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation",
    re.IGNORECASE,
)
_SIZE = re.compile(r"allocate (\d[\d.]* ?(?:[KMGT]i?B|bytes))")


class Steps:
    """Schedules, launches and reads steps for an engine. `ahead`: the executor, where a step may be
    launched before the latest was read (ADR 0033). `tell` hands faults to whoever keeps records.

    `overlapped` counts steps that were, `waits` those that waited, by reason.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        recorder: FlightRecorder,
        timer: StackTimer,
        tell: Callable[[Fault], None],
        *,
        ahead: LateExecutor | None = None,
    ) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._recorder, self._timer, self._tell = recorder, timer, tell
        self._ahead = ahead
        self._open: deque[StepPlan] = deque()
        self._held: StepPlan | None = None  # scheduled; waits until the open one was taken in
        self.overlapped, self.waits = 0, Counter[str]()
        self._failed: Exception | None = None  # why the latest open plan was not launched
        self.last_s = 0.0

    def turn(self) -> tuple[StepPlan | None, list[RequestOutput]]:
        """Launch what may run, then take in the oldest open step: its plan, and what came of it.

        Raises:
            InternalError: an invariant broke; the engine must not go on.
        """
        if not self._open and (plan := self._held or self._scheduler.schedule()) is not None:
            self._held = None
            self._launch(plan)
        if self._ahead is not None and self._ahead.unread and self._may_follow:
            self._follow(self._ahead)
        if not self._open:
            return None, []
        plan = self._open.popleft()
        return plan, self._take(plan)

    @property
    def _alone(self) -> OneDevice | None:
        """The executor, where it may do what other ranks do not."""
        return self._executor if isinstance(self._executor, OneDevice) else None

    @property
    def _may_follow(self) -> bool:
        """Whether one step is open, and requests are not being tried one by one."""
        alone = len(self._open) == 1 and self._failed is None
        return alone and self._scheduler.trials.wanted is None

    def _follow(self, device: LateExecutor) -> None:
        """Schedule the next step; launch it behind the open one, or keep it until that was read."""
        plan = self._scheduler.schedule()
        if plan is None:
            return
        if why := device.waits_for(plan):
            self.waits[why] += 1
            self._held = plan
        else:
            self.overlapped += 1
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        """What fails here fails in its turn, when the step ahead of it has been taken in."""
        self._recorder.begin(plan)
        self._timer.begin()
        self._open.append(plan)
        try:
            self._executor.submit(plan)
        except Exception as error:  # noqa: BLE001 - raised by `_take`, after the step ahead
            self._failed = error

    def _take(self, plan: StepPlan) -> list[RequestOutput]:
        """Commit what came of the oldest step; `self._open` has those behind it."""
        try:
            if self._failed is not None and not self._open:
                raise self._failed
            result = self._executor.collect()
        except Exception as error:
            self._failed = None
            self._recorder.failed(error)
            device = self._alone if not (self._open or self._held) else None
            if device is None or not is_out_of_memory(error):
                raise
            asked = _SIZE.search(str(error))
            # The frames below hold the tensors that filled the memory.
            traceback.clear_frames(error.__traceback__)
            size = asked[1] if asked else ""
        else:
            for run in result.runs:
                if run.code == NON_FINITE and not self._scheduler.ended(run.slot):
                    self._locate(plan, run.slot)
            self._recorder.end(result)
            self.last_s = result.seconds
            return self._scheduler.commit(result)
        return self._give_up(plan, device, size)

    def _give_up(self, plan: StepPlan, device: OneDevice, asked: str) -> list[RequestOutput]:
        gc.collect()
        free = device.free_memory()
        runs = sum(len(rank.runs) for segment in plan.segments for rank in segment.ranks)
        size = f"{asked} were asked for, " if asked else ""
        text = (
            f"memory did not suffice for a step of {plan.tokens} tokens of {runs} requests: "
            f"{size}{free / 2**20:.0f} MiB are free now"
        )
        outputs = self._scheduler.abandon(
            f"memory did not suffice for this request alone: {size}{free / 2**20:.0f} MiB are free "
            f"now, and its last try was a step of {plan.tokens} tokens"
        )
        self._report(
            OUT_OF_MEMORY,
            plan,
            text,
            ended=[hashed(output.request_id) for output in outputs],
            tokens=plan.tokens,
            runs=runs,
            free_bytes=free,
        )
        return outputs

    def _locate(self, plan: StepPlan, slot: int) -> None:
        """Say where a run's NaN came from, if this executor can tell."""
        request = self._recorder.name_of(slot)
        where = "this executor cannot look for the place"
        place = None
        if any(slot in later.released for later in self._open):
            where = "the request was put back meanwhile"
        elif (device := self._alone) is not None:
            try:
                place = device.locate(plan, slot)
                where = f"first at {place}" if place is not None else "not so when computed again"
            except (RuntimeError, MemoryError) as error:
                where = f"the look for its place ended with {type(error).__name__}"
        layer = None if place is None else place.layer
        site = None if place is None else place.site
        text = f"NaN or infinity in request {request}, step {plan.step}: {where}"
        self._report(NON_FINITE, plan, text, request=request, site=site, layer=layer)

    def _report(self, kind: str, plan: StepPlan, text: str, **numbers: object) -> None:
        self._recorder.note(kind, text, step=plan.step, **numbers)
        self._tell(Fault(kind, text))

    def rest(self) -> None:
        """No step follows for now: nothing can hang."""
        self._timer.rest()


def guard_trace(guard: NanGuard, resolved: Resolved, trace: Trace | None) -> Trace | None:
    """The trace that an executor under `guard` needs.

    Raises:
        UsageError: several ranks cannot be guarded in that way.
    """
    ranks = resolved.plan.layouts[0].ranks
    if guard is not NanGuard.LOGITS and ranks > 1:
        raise UsageError(
            f"--nan-guard {guard.value} works on one device, and this plan has {ranks} ranks.",
            "Leave it out, or pass --parallel single.",
        )
    if guard is not NanGuard.LAYERS:
        return trace
    from metainfer.executor.finite import FiniteTrace

    return FiniteTrace()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice, on the host or on a device; `torch` need not be loaded."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
