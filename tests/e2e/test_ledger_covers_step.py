"""Law 1 at run time: no operation over 1 MFLOP runs outside the table that the plan chose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ask, start
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from metainfer.core.intent import Intent
from metainfer.core.request import SamplingParams
from metainfer.core.step import Phase
from metainfer.engine.engine import Engine
from metainfer.kernels.table import Trace

LIMIT = 1_000_000


class Outside(TorchDispatchMode):
    """Counts FLOP of every aten operation that no op of the table encloses."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self.found: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._trace.inside:
            self.found.append((str(func), self._flop(func, args, kwargs or {}, out)))
        return out

    @staticmethod
    def _flop(func: Any, args: Any, kwargs: Any, out: Any) -> float:
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            return float(flop_registry[packet](*args, **kwargs, out_val=out))
        # Anything else computes at most a few operations per element that it makes.
        views = {"aten.view", "aten.slice", "aten.split", "aten.select", "aten.detach"}
        moves = {"aten.clone", "aten.copy_", "aten._to_copy", "aten.index", "aten.empty"}
        if any(str(func).startswith(name) for name in views | moves):
            return 0.0
        return float(out.numel()) if isinstance(out, torch.Tensor) else 0.0


def traced_engine(model: str, **intent: Any) -> tuple[Engine, Trace]:
    trace = Trace()
    engine = Engine(Intent(model=model, threads=1, **intent), trace=trace)
    engine.start()
    return engine, trace


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_operation_over_a_megaflop_outside_the_table(dtype: str) -> None:
    # 40 rows through hidden 96: the smallest projection is 2.4 MFLOP, so a stray one is seen.
    engine, trace = traced_engine("random:tiny-qwen3", dtype=dtype, chunk_tokens=64, concurrency=2)
    prompts = [list(range(3, 43)), list(range(60, 100))]
    with Outside(trace) as outside:
        ask(engine, prompts, SamplingParams(temperature=0.7, seed=1, max_tokens=5))
    assert outside.found, "the mode saw nothing"
    worst = max(outside.found, key=lambda item: item[1])
    assert worst[1] <= LIMIT, f"{worst[0]} computed {worst[1]:.0f} FLOP outside the ledger"
    assert trace.by_impl(Phase.DECODE) and trace.by_impl(Phase.CHUNK)


def test_the_check_sees_a_stray_projection() -> None:
    """The test above can fail: a matrix product beside the table is found."""
    trace = Trace()
    with Outside(trace) as outside:
        torch.ones(40, 96) @ torch.ones(96, 160)
    assert max(flop for _, flop in outside.found) > LIMIT


def test_the_table_runs_what_the_plan_names() -> None:
    engine, trace = traced_engine("random:tiny-llama", chunk_tokens=64, concurrency=2)
    ask(engine, [list(range(3, 43))], SamplingParams(temperature=0.0, max_tokens=4))
    assert engine.resolved is not None
    for (phase, site, impl), _ in trace.calls.items():
        assert engine.resolved.plan.ops[f"{site}@{phase.value}"].impl == impl


def test_engine_restart_asks_no_kernel_twice() -> None:
    """Qualification is a record: the second start of the same machine runs no case."""
    notes: list[str] = []

    def note(progress: Any) -> None:
        if progress.phase == "qualify kernels" and progress.detail:
            notes.append(progress.detail)

    start("random:tiny-llama")
    Engine(Intent(model="random:tiny-llama", threads=1), note).start()
    assert notes == []
