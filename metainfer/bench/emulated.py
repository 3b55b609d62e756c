"""`bench offline --rank-of N --machine NAME`: one rank's times, its peers emulated, on two sides.

`day-0`: what a stock engine does there, one tensor-parallel layout over all cards for both phases
and NCCL. `ours`: the plan's layout and collectives, or several layouts one after another. Kernels
are chosen by the same rules on all sides. Every figure is labelled emulated: compute, launches and
memory of one rank are measured here, what its peers cost is predicted (`comm.backends.emulated`). A
batch is that of all ranks; the rank runs its domain's part of it, and a decode is timed while all
of that is running.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from metainfer.bench.conditions import conditions
from metainfer.bench.offline import EngineSide, OfflineOptions, drawn_prompts
from metainfer.comm.backends.emulated import Waited
from metainfer.core.errors import UsageError, UserError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.engine.engine import Engine
from metainfer.engine.machine import open_machine
from metainfer.planner.candidate import Candidate
from metainfer.planner.opening import open_model

DAY_0, OURS, AUTO = "day-0", "ours", "auto"


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
    layouts: Sequence[str] = (),
) -> dict[str, Any]:
    """``{"emulated", "rows", "sides", "verification", "conditions"}``; `keep` is given what there
    is of it so far behind every row. `layouts`: of our sides, `AUTO` as planned; none: the one that
    `intent` asks for. Of several a side that cannot be has a reason in place of rows.

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
    ours = {f"{OURS} {name}": _under(wanted, name) for name in layouts} or {OURS: wanted}
    for name, wish in {DAY_0: day_0(wanted), **ours}.items():
        log(f"{name}: layout {wish.parallel or 'as planned'}")
        try:
            _measure(name, wish, options, log, document, keep)
        except UserError as error:
            if not layouts:
                raise
            log(f"{name}: {error}")
            document["sides"][name] = {"refused": str(error)}
            keep(document)
    return document


def _under(intent: Intent, layout: str) -> Intent:
    return replace(intent, parallel=None if layout == AUTO else layout)


def _measure(
    name: str,
    wish: Intent,
    options: OfflineOptions,
    log: Callable[[str], None],
    document: dict[str, Any],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """One side's rows, put into `document`."""
    engine = Engine(wish)
    try:
        engine.start()
        assert engine.resolved is not None
        plan = engine.resolved.plan
        described: dict[str, Any] = conditions(plan)
        first = document.setdefault("conditions", described)
        side = document["sides"][name] = {
            "layout": plan.layouts[0].name,
            "emulated": dict(plan.emulated),
            "plan": plan.fingerprint,
            "shared_beside": plan.shared_beside,
            "held_bytes": engine.held_bytes,
            "other_ops": _unlike(described["ops"], first["ops"]),
        }
        for row in _Side(name, engine, options, log).rows():
            document["rows"].append(row)
            side["paths"] = engine.emulated_paths
            keep(document)
    finally:
        engine.close()


def _unlike(ops: Mapping[str, str], first: Mapping[str, str]) -> dict[str, str]:
    """Ops that are not what the first side runs."""
    return {op: impl for op, impl in ops.items() if first.get(op) != impl}


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
        self._timed = EngineSide(engine, self._vocab)

    def rows(self) -> Iterator[dict[str, Any]]:
        for batch in self._options.batches:
            yield self._decode(batch)
        if self._options.prefill_tokens:
            yield self._prefill()

    def _decode(self, batch: int) -> dict[str, Any]:
        """Spans of steps behind one prefill; the first of them warms up."""
        options = self._options
        own, steps = -(-batch // self._domains), options.output_tokens - 1
        turns = options.repeats + 1
        begin = options.prompt_tokens
        title = f"decode, batch {batch}, context {begin}-{begin + 1 + turns * steps}"
        self._log(f"measuring {title}, {self._name}")
        seed = options.seed + 104_729 * own
        self._timed.fill(drawn_prompts(own, begin, self._vocab, seed), 1 + turns * steps)
        spans = [self._span(lambda: self._timed.decode(steps)) for _ in range(turns)]
        self._timed.end()
        return self._row(title, batch * steps, spans[1:])

    def _prefill(self) -> dict[str, Any]:
        options = self._options
        title = f"prefill, {options.prefill_tokens} tokens in each domain"
        self._log(f"measuring {title}, {self._name}")
        spans = []
        for turn in range(options.repeats + 1):
            seed = options.seed + 31 * turn
            prompts = drawn_prompts(1, options.prefill_tokens, self._vocab, seed)
            spans.append(self._span(partial(self._timed.fill, prompts, 1)))
            self._timed.end()
        return self._row(title, options.prefill_tokens * self._domains, spans[1:])

    def _row(self, title: str, tokens: int, spans: Sequence[Span]) -> dict[str, Any]:
        """`tokens`: of all domains in each span."""
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

    def _span(self, work: Callable[[], None]) -> Span:
        begin = self._mark()
        work()
        end = self._mark()
        return Span(end.seconds - begin.seconds, end.steps - begin.steps, end.waited - begin.waited)

    def _mark(self) -> Span:
        waited = self._engine.waited
        assert waited is not None
        return Span(time.perf_counter(), self._engine.stats().steps, waited)


def table(document: dict[str, Any]) -> str:
    """Both sides, row by row, with what of a step is waiting for peers."""
    lines = [f"EMULATED: {document['emulated']}; its peers are a stand-in, their time predicted"]
    for name, side in document["sides"].items():
        if "refused" in side:
            lines.append(f"{name}: {side['refused']}")
            continue
        paths = ", ".join(f"{path} {share:.0%}" for path, share in side["paths"].items())
        lines.append(f"{name}: layout {side['layout']}, collectives {paths or 'none'}")
    for row in document["rows"]:
        wait, step = row["exposed_wait_us"]["median"], row["step_us"]["median"]
        late = f", {row['late']} late by {row['late_us']:.0f} us a step" if row["late"] else ""
        lines.append(
            f"{row['row']:<44} {row['engine']:<20} {row['median']:>9.1f} {row['unit']}"
            f"  step {step:>9.0f} us, exposed wait {wait:>8.0f} us in {row['collectives']:.0f}"
            f" collectives{late}"
        )
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> dict[str, Any]:
    median = statistics.median(values)
    mad = statistics.median(abs(value - median) for value in values)
    return {"median": median, "mad": mad, "n": len(values), "values": list(values)}
