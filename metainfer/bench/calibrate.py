"""`bench calibrate`: how long steps take here, as a record that plan and simulator price with.

The engine serves small loads of its own: decodes in several numbers and contexts, prompts of
several lengths, prompts beside decodes. Each step is a sample, with the work that its plan says
and the time of its whole turn. Loads take turns and are drawn anew, so that a machine whose speed
drifts bends no single row; a sample is the median of what is alike.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace

from metainfer.bench import path
from metainfer.bench.alone import check_alone
from metainfer.bench.client import Server
from metainfer.bench.conditions import conditions
from metainfer.bench.offline import drawn_prompts
from metainfer.core.errors import InternalError, RefusedError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.records import Record
from metainfer.core.request import Request, SamplingParams
from metainfer.core.step import Phase, StepPlan
from metainfer.engine.engine import Engine
from metainfer.engine.machine import open_machine
from metainfer.planner import calibration
from metainfer.planner.amounts import Amounts
from metainfer.planner.calibration import Calibration, Sample
from metainfer.planner.launches import launch_seconds
from metainfer.planner.opening import open_model
from metainfer.planner.steps import StepCost

ALIKE = 128
"""Tokens of context that a group of samples spans."""


MOST_CACHED = 4096
"""Tokens of all prompts of a load that decodes at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """`repeats`: turns of every load; one more warms up. `keep`: write the record."""

    repeats: int = 5
    seed: int = 0
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Load:
    """Requests submitted together: `decodes` of (prompt, answer) tokens, and once all of them
    decode, `late` prompts."""

    decodes: int
    prompt: int
    answer: int
    late: tuple[int, ...] = ()


@dataclass(slots=True)
class _Steps:
    """What the engine's turns took, by phase, rows and context."""

    cost: StepCost
    taken: dict[tuple[Phase, int, int], list[tuple[Amounts, float]]] = field(default_factory=dict)

    def note(self, plan: StepPlan, seconds: float) -> None:
        if len(plan.segments) != 1:
            return
        (segment,) = plan.segments
        runs = [run for rank in segment.ranks for run in rank.runs]
        reach = sum(run.end for run in runs) // len(runs) // ALIKE
        amounts = self.cost.segment(segment)
        key = (segment.phase, amounts.rows, reach)
        self.taken.setdefault(key, []).append((amounts, seconds))

    def samples(self) -> list[Sample]:
        found = []
        for (phase, _, _), each in sorted(self.taken.items(), key=lambda item: item[0]):
            middle = sorted(each, key=lambda pair: pair[0].attention)[len(each) // 2][0]
            found.append(Sample(phase, middle, statistics.median(s for _, s in each)))
        return found


Serve = Callable[[], AbstractContextManager[Server]]
"""Starts a server of the same engine."""


def run(
    intent: Intent,
    options: CalibrateOptions,
    log: Callable[[str], None],
    serve: Serve | None = None,
) -> dict[str, object]:
    """Measure, fit, keep: ``{"calibration", "samples", "key", "conditions"}``.

    `serve`: for what a server adds to steps; without it that stays 0.

    Raises:
        RefusedError: the family has no cost model, or the plan has several ranks; before anything
            is loaded.
    """
    machine = open_machine(intent.platform)
    first = machine.resolve(open_model(intent.model, adapters=intent.adapters), intent)
    check_alone(first)
    if first.chosen.cost is None:
        raise RefusedError(
            f"steps of {first.plan.model.family} cannot be priced: the family has no cost model.",
            "There is nothing to calibrate: its plans have no prices that a record could mend.",
            code="no_cost_model",
        )
    origins = {**intent.origins, "prefix_cache": Origin.DERIVED}
    apart = replace(intent, prefix_cache=False, origins=origins)
    with closing(Engine(apart, lambda progress: None)) as engine:
        info = engine.start()
        resolved = engine.resolved
        if resolved is None:
            raise InternalError("the engine has not started")
        cost = resolved.chosen.cost
        assert cost is not None  # as the first plan has it
        steps = _Steps(cost)
        limits = resolved.plan.limits
        loads = list(
            _loads(
                info.max_context, info.max_running, limits.step_tokens, limits.mixed_prefill_tokens
            )
        )
        for turn in range(options.repeats + 1):
            log(f"turn {turn} of {options.repeats}: {len(loads)} loads")
            engine.on_step = steps.note if turn else None
            for number, load in enumerate(loads):
                _serve(
                    engine, load, info.vocab_size, f"{turn}-{number}", options.seed + 7919 * turn
                )
    samples = steps.samples()
    told = conditions(resolved.plan) | {"repeats": options.repeats, "loads": len(loads)}
    fitted = calibration.calibrate(
        samples,
        launch_s=launch_seconds(machine.facts.device.kind),
        origin=f"bench calibrate, {told['time']}",
    )
    if serve is not None:
        with serve() as server:
            found = asyncio.run(path.measure(server, fitted, cost, info.max_running, options.seed))
        log(f"{found.request_s * 1e3:.2f} ms a request, {found.token_s * 1e3:.3f} ms a token")
        fitted = replace(fitted, request_s=found.request_s, token_s=found.token_s)
    plan = resolved.plan
    key = calibration.key(resolved.arch, plan.model.dtype, resolved.selection.bundle, plan.threads)
    if options.keep:
        machine.store.put(Record(calibration.KIND, key, fitted.to_json(), told))
    return {
        "calibration": fitted.to_json(),
        "samples": [_row(sample, fitted) for sample in samples],
        "key": key,
        "kept": options.keep,
        "conditions": told,
    }


def _row(sample: Sample, fitted: Calibration) -> dict[str, object]:
    amounts = sample.amounts
    return {
        "phase": sample.phase.value,
        "rows": amounts.rows,
        "flops": amounts.flops,
        "attention_flops": amounts.attention,
        "moved_bytes": amounts.moved,
        "seconds": sample.seconds,
        "fitted_s": fitted(sample.phase, amounts),
    }


def _loads(context: int, running: int, step: int, mixed: int) -> Iterator[Load]:
    """Decodes and prompts over the ranges that the plan allows."""
    answer = 12
    most = min(running, 64)
    batches = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most]
    for reach in (32, 512):
        for batch in batches:
            if reach + answer <= context and batch * reach <= MOST_CACHED:
                yield Load(batch, reach, answer)
    room = context - 2
    for tokens in sorted({16, 48, 128, 256, 512, step, step + step // 2}):
        if tokens <= room:
            yield Load(0, 0, 0, (tokens,))
    for batch in batches[::2]:
        for tokens in sorted({16, mixed // 2, mixed + mixed // 2}):
            if 1 <= tokens <= room and context >= 48 and batch < running:
                yield Load(batch, 32, 16, (tokens,))


def _serve(engine: Engine, load: Load, vocab: int, name: str, seed: int) -> None:
    """Run one load to its end."""
    prompts = drawn_prompts(load.decodes, load.prompt, vocab, seed + 104_729)
    late: Sequence[Sequence[int]] = [
        drawn_prompts(1, tokens, vocab, seed + 31 * tokens)[0] for tokens in load.late
    ]
    for number, early in enumerate(prompts):
        _submit(engine, f"{name}-{number}", early, load.answer)
    waits, decoding = set(range(len(prompts))), False
    while engine.has_work or late:
        if late and (decoding or not prompts):
            for number, prompt in enumerate(late):
                _submit(engine, f"{name}-late-{number}", prompt, 1)
            late = []
        outputs, _ = engine.step()
        waits -= {int(o.request_id.rpartition("-")[2]) for o in outputs if o.tokens and waits}
        decoding = not waits


def _submit(engine: Engine, name: str, prompt: Sequence[int], answer: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    engine.submit(Request(name, tuple(prompt), params))
