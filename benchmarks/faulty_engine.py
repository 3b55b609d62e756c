"""The engine process with faults on order, for the fault campaign and the tests.

``faulty_engine.py FOLDER --address ...``: a file in FOLDER is an order, taken at the next step and
then deleted: ``nan`` (the first run of the step meets NaN), ``oom`` (the step raises as torch does
when memory lacks), ``hang`` (it never ends, and lets the interpreter go), ``lock`` (it never ends,
and holds the interpreter's lock), ``raise`` (an error nobody expects). While there is a file
``hold``, no step is taken after one that brought tokens: answers stay open for as long as somebody
looks, and messages are obeyed.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import torch

from metainfer.core.step import RequestOutput, Segment, StepPlan
from metainfer.engine import process
from metainfer.engine.engine import Engine
from metainfer.engine.protocol import EngineStats

FAULTS = ("nan", "oom", "hang", "lock", "raise")


class FaultyEngine(Engine):
    """An engine whose device obeys orders."""

    folder = Path()
    _held = False

    def step(self) -> tuple[list[RequestOutput], EngineStats]:
        hold = self.folder / "hold"
        if self._held and hold.exists() and self.scheduler.running:
            time.sleep(0.005)
            return [], self.stats()
        outputs, stats = super().step()
        self._held = hold.exists() and any(output.tokens for output in outputs)
        return outputs, stats

    def start(self) -> Any:
        info = super().start()
        executor: Any = self._executor
        launch, segment = executor._launch, executor._segment
        spoil = False

        def faulty_launch(plan: StepPlan) -> Any:
            nonlocal spoil
            spoil = self._ordered("nan")
            if self._ordered("oom"):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
            if self._ordered("raise"):
                raise ValueError("an error on order")
            if self._ordered("hang"):
                time.sleep(3600)
            if self._ordered("lock"):
                ctypes.PyDLL(None).sleep(3600)
            return launch(plan)

        def faulty_segment(one: Segment) -> Any:
            nonlocal spoil
            if not spoil:
                return segment(one)
            spoil = False
            model = executor._parts.model
            forward = model.forward

            def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
                hidden = forward(*args, **kwargs)
                hidden[: len(one.ranks[0].runs[0].tokens)] = float("nan")
                return hidden

            model.forward = broken
            try:
                return segment(one)
            finally:
                del model.forward

        executor._launch, executor._segment = faulty_launch, faulty_segment
        return info

    def _ordered(self, fault: str) -> bool:
        try:
            (self.folder / fault).unlink()
        except FileNotFoundError:
            return False
        return True


if __name__ == "__main__":
    FaultyEngine.folder = Path(sys.argv.pop(1))
    sys.exit(process.main(FaultyEngine))
