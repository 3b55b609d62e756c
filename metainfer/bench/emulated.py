"""`bench offline --rank-of N --machine NAME`: one rank's times, its peers emulated, on two sides.

`day-0`: what a stock engine does there, one tensor-parallel layout over all cards for both phases
and NCCL. `ours`: the plan's layout and collectives. Kernels are the same on both sides. Every
figure is labelled emulated: compute, launches and memory of one rank are measured here, what its
peers cost is predicted (`comm.backends.emulated`). A batch is that of all ranks; the rank runs its
domain's part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metainfer.bench.conditions import conditions
from metainfer.bench.offline import OfflineOptions, drawn_prompts
from metainfer.comm.backends.emulated import Waited
from metainfer.core.errors import InternalError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine
from metainfer.engine.machine import open_machine
from metainfer.planner.candidate import Candidate
from metainfer.planner.opening import open_model

DAY_0, OURS = "day-0", "ours"


@dataclass(frozen=True, slots=True)
class Span:
    """Some steps: seconds, and what collectives took of them."""

    seconds: float
    steps: int
    waited: Waited


def run(
    intent: Intent,
    options: OfflineOptions,
    log: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """``{"emulated", "rows", "sides", "verification", "conditions"}``; `keep` is given what there
    is of it so far behind every row.

    Raises:
        UsageError: something is to be measured beside it.
        RefusedError: no layout can be, or not the one that was asked for.
    """
    if options.against:
        raise UsageError(
            f"--against {options.against} compares answers, and an emulated rank has none.",
            "Leave one of the two out.",
        )
    origins = {**intent.origins, "prefix_cache": Origin.DERIVED}
    wanted = replace(
        intent,
        prefix_cache=False,
        origins=origins,
        concurrency=intent.concurrency or max(options.batches),
    )
    document: dict[str, Any] = {
        "emulated": f"rank 0 of {intent.rank_of} of {intent.of_machine}",
        "rows": [],
        "sides": {},
        "verification": {"checked": False, "why": "emulated: its answers mean nothing"},
    }
    for name, wish in ((DAY_0, day_0(wanted)), (OURS, wanted)):
        log(f"{name}: layout {wish.parallel or 'as planned'}")
        engine = Engine(wish)
        try:
            engine.start()
            assert engine.resolved is not None
            plan = engine.resolved.plan
            side = document["sides"][name] = {
                "layout": plan.layouts[0].name,
                "emulated": dict(plan.emulated),
                "plan": plan.fingerprint,
                "held_bytes": engine.held_bytes,
            }
            document["conditions"] = conditions(plan)
            for row in _Side(name, engine, options, log).rows():
                document["rows"].append(row)
                side["paths"] = engine.emulated_paths
                keep(document)
        finally:
            engine.close()
    return document


def day_0(intent: Intent) -> Intent:
    """What a stock engine would do: as many tensor ranks as the model allows, NCCL."""
    machine = open_machine(intent.platform)
    judged = machine.resolve(open_model(intent.model), replace(intent, parallel=None)).layouts

    def order(each: Candidate) -> tuple[int, int]:
        return each.layout.tensor, -each.layout.expert

    stock = max((each for each in judged if each.feasible), key=order)
    return replace(intent, parallel=stock.layout.name, collectives="nccl")


class _Side:
    """One side's rows."""

    def __init__(
        self, name: str, engine: Engine, options: OfflineOptions, log: Callable[[str], None]
    ) -> None:
        assert engine.resolved is not None
        plan = engine.resolved.plan
        self._name, self._engine, self._options, self._log = name, engine, options, log
        self._vocab, self._domains = plan.model.vocab_size, plan.layouts[0].data
        self._count = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        options = self._options
        for batch in options.batches:
            last = options.prompt_tokens + options.output_tokens
            title = f"decode, batch {batch}, context {options.prompt_tokens}-{last}"
            own = -(-batch // self._domains)
            tokens = batch * (options.output_tokens - 1)
            sizes = (options.prompt_tokens, options.output_tokens)
            yield self._row(title, own, sizes, tokens, decode=True)
        if options.prefill_tokens:
            title = f"prefill, {options.prefill_tokens} tokens in each domain"
            tokens = options.prefill_tokens * self._domains
            yield self._row(title, 1, (options.prefill_tokens, 1), tokens, decode=False)

    def _row(
        self, title: str, own: int, sizes: tuple[int, int], tokens: int, *, decode: bool
    ) -> dict[str, Any]:
        """`own` sequences on this rank; `tokens`: of all domains in what is timed."""
        self._log(f"measuring {title}, {self._name}")
        spans = []
        for turn in range(self._options.repeats + 1):
            seed = self._options.seed + 31 * turn + 104_729 * own
            both = self._generate(drawn_prompts(own, sizes[0], self._vocab, seed), sizes[1])
            if turn:  # the first turn warms up
                spans.append(both[1] if decode else both[0])
        return {
            "row": title,
            "engine": f"{self._name}, emulated",
            "unit": "tokens/s",
            **_spread([tokens / span.seconds for span in spans]),
            "step_us": _spread([span.seconds * 1e6 / span.steps for span in spans]),
            "exposed_wait_us": _spread([span.waited.us / span.steps for span in spans]),
            "collectives": spans[0].waited.calls / spans[0].steps,
            "late": sum(span.waited.late for span in spans),
            "late_us": sum(span.waited.late_us for span in spans) / sum(s.steps for s in spans),
        }

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[Span, Span]:
        """Prefill and decode; the border is the last first token."""
        engine = self._engine
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        waiting = set()
        for prompt in prompts:
            self._count += 1
            waiting.add(name := f"bench-{self._count}")
            engine.submit(Request(name, tuple(prompt), params))
        marks = [self._mark()]
        while engine.has_work:
            outputs, _ = engine.step()
            waiting -= {output.request_id for output in outputs if output.tokens}
            if not waiting and len(marks) == 1:
                marks.append(self._mark())
        marks.append(self._mark())
        if len(marks) != 3:
            raise InternalError("a request of the benchmark ended without a token")
        (begin, border, end) = marks
        return _between(begin, border), _between(border, end)

    def _mark(self) -> Span:
        waited = self._engine.waited
        assert waited is not None
        return Span(time.perf_counter(), self._engine.stats().steps, waited)


def table(document: dict[str, Any]) -> str:
    """Both sides, row by row, with what of a step is waiting for peers."""
    lines = [f"EMULATED: {document['emulated']}; its peers are a stand-in, their time predicted"]
    for name, side in document["sides"].items():
        paths = ", ".join(f"{path} {share:.0%}" for path, share in side["paths"].items())
        lines.append(f"{name}: layout {side['layout']}, collectives {paths or 'none'}")
    for row in document["rows"]:
        wait, step = row["exposed_wait_us"]["median"], row["step_us"]["median"]
        late = f", {row['late']} late by {row['late_us']:.0f} us a step" if row["late"] else ""
        lines.append(
            f"{row['row']:<44} {row['engine']:<16} {row['median']:>9.1f} {row['unit']}"
            f"  step {step:>9.0f} us, exposed wait {wait:>8.0f} us in {row['collectives']:.0f}"
            f" collectives{late}"
        )
    return "\n".join(lines)


def _between(begin: Span, end: Span) -> Span:
    return Span(end.seconds - begin.seconds, end.steps - begin.steps, end.waited - begin.waited)


def _spread(values: Sequence[float]) -> dict[str, Any]:
    median = statistics.median(values)
    mad = statistics.median(abs(value - median) for value in values)
    return {"median": median, "mad": mad, "n": len(values), "values": list(values)}
