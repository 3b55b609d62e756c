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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from metainfer.core.errors import UsageError
from metainfer.core.step import NON_FINITE, OUT_OF_MEMORY, RequestOutput, StepPlan, StepResult
from metainfer.engine.protocol import Fault
from metainfer.engine.recorder import FlightRecorder, hashed
from metainfer.engine.stacks import StackTimer
from metainfer.executor.protocol import NanGuard
from metainfer.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from metainfer.kernels.table import Trace
    from metainfer.planner.resolve import Resolved

_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation",
    re.IGNORECASE,
)
_SIZE = re.compile(r"allocate (\d[\d.]* ?(?:[KMGT]i?B|bytes))")


class Device(Protocol):
    """An executor of one process; ranks answer as a group and cannot go on alone."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class Steps:
    """Runs plans for an engine. `tell` hands faults to whoever keeps records."""

    def __init__(
        self,
        executor: Device,
        scheduler: Scheduler,
        recorder: FlightRecorder,
        timer: StackTimer,
        tell: Callable[[Fault], None],
    ) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._recorder, self._timer, self._tell = recorder, timer, tell
        self.last_s = 0.0

    def run(self, plan: StepPlan) -> list[RequestOutput]:
        """Execute `plan` and commit what came of it.

        Raises:
            InternalError: an invariant broke; the engine must not go on.
        """
        self._recorder.begin(plan)
        self._timer.begin()
        try:
            result = self._executor.execute(plan)
        except Exception as error:
            self._recorder.failed(error)
            if not (is_out_of_memory(error) and hasattr(self._executor, "free_memory")):
                raise
            asked = _SIZE.search(str(error))
            # The frames below hold the tensors that filled the memory.
            traceback.clear_frames(error.__traceback__)
            size = asked[1] if asked else ""
        else:
            self._recorder.end(result)
            self.last_s = result.seconds
            for run in result.runs:
                if run.code == NON_FINITE:
                    self._locate(plan, run.slot)
            return self._scheduler.commit(result)
        return self._give_up(plan, size)

    def _give_up(self, plan: StepPlan, asked: str) -> list[RequestOutput]:
        gc.collect()
        executor: Any = self._executor
        free = executor.free_memory()
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
        locate = getattr(self._executor, "locate", None)
        request = self._recorder.name_of(slot)
        where = "this executor cannot look for the place"
        place = None
        if locate is not None:
            try:
                place = locate(plan, slot)
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


def set_guard(executor: Any, guard: NanGuard) -> None:
    """Tell an executor of one device what to look at; ranks look at logits."""
    if hasattr(executor, "nan_guard"):
        executor.nan_guard = guard


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice, on the host or on a device; `torch` need not be loaded."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
