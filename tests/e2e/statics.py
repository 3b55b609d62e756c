"""Captured steps on CPU: a graph of torch operators stands for a card's (`tests/capture.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from capture import RecordedGraph, recorded

from metainfer.core.plan import StepGraph
from metainfer.engine.engine import Engine
from metainfer.executor.graphs import Capture, StaticOutput, StaticSteps, Step
from metainfer.executor.local import LocalExecutor
from metainfer.executor.static import DeviceTables


class Poisoned:
    """A recorded step; before each replay everything that it made before is overwritten."""

    def __init__(self, graph: RecordedGraph) -> None:
        self.graph = graph

    def replay(self) -> None:
        self.graph.poison()
        self.graph.replay()


def record(step: Step) -> tuple[Poisoned, StaticOutput]:
    step()  # as on a card: what is made once is made here
    with recorded() as graph:
        out = step()
    return Poisoned(graph), out


class Again:
    """Stands for a graph where an op asks the host: the step's Python once more, into the same
    results."""

    def __init__(self, step: Step, out: StaticOutput) -> None:
        self.step, self.out = step, out

    def replay(self) -> None:
        new = self.step()
        self.out.logits.copy_(new.logits)
        if self.out.finite is not None and new.finite is not None:
            self.out.finite.copy_(new.finite)


def again(step: Step) -> tuple[Again, StaticOutput]:
    out = step()
    return Again(step, out), out


def decode(*runs: int) -> tuple[StepGraph, ...]:
    return tuple(StepGraph(phase="decode", tokens=n, runs=n) for n in sorted(runs, reverse=True))


def executor_of(engine: Engine) -> LocalExecutor:
    assert isinstance(engine._executor, LocalExecutor)
    return engine._executor


def capture_steps(
    executor: LocalExecutor, shapes: Sequence[StepGraph], capture: Capture = record
) -> StaticSteps:
    """Let `executor`, which has nothing under way, replay steps of `shapes` from now on."""
    executor._parts = replace(executor._parts, graphs=tuple(shapes))
    tables = DeviceTables(executor._slots, executor._parts.device)
    made = StaticSteps(executor._parts, tables, capture)
    for shape in shapes:
        made.capture(shape)
    executor._tables, executor._static = tables, made
    return made


def release_steps(executor: LocalExecutor) -> None:
    """Back to steps op by op on their own shapes, each read at once."""
    executor._static = executor._tables = None
    executor._parts = replace(executor._parts, graphs=(), overlap=False)


class Logits:
    """Keeps every row of logits that an engine's executor draws from."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[torch.Tensor] = []
        self._executor: Any = executor_of(engine)

    def __enter__(self) -> Logits:
        finish = self._executor._finish

        def kept(segment: Any, logits: Any, *rest: Any) -> Any:
            if logits is not None:
                self.rows.append(logits.clone())
            return finish(segment, logits, *rest)

        self._executor._finish = kept
        return self

    def __exit__(self, *error: Any) -> None:
        del self._executor._finish


def overlap_steps(
    engine: Engine, shapes: Sequence[StepGraph], capture: Capture = record
) -> StaticSteps:
    """As `capture_steps`; each captured step is launched before the one ahead of it was read."""
    executor = executor_of(engine)
    made = capture_steps(executor, shapes, capture)
    executor._parts = replace(executor._parts, overlap=True)
    assert engine._steps is not None
    engine._steps._ahead = executor
    return made
