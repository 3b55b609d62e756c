"""A draft layer (MTP) over several ranks proposes what it proposes alone, and changes no token.

Float64, as `test_ranks_answers`, with preemption and prefix hits. Drafts never change a token, so
equal tokens would not show a wrong one: what every rank proposed is compared with one process that
saw the same tokens.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import v4
from harness import Answer, ask, start
from test_invariance import same
from thread_ranks import ThreadGroup, making_room, ranks_as_threads

from metainfer.comm.side import Pending
from metainfer.core.request import SamplingParams
from metainfer.core.step import Phase, Segment, StepPlan
from metainfer.engine.engine import Engine
from metainfer.executor.ranks import RankExecutor
from metainfer.executor.slots import SlotTable

FEW = 4
REQUESTS = int(os.environ.get("RANK_REQUESTS", FEW))  # 200 by hand, of more layouts
DEPTH, CHUNK, VOCAB = 3, 33, 256
FIXED: dict[str, Any] = {
    "dtype": "float64",
    "context": 128,
    "page_tokens": 16,
    "chunk_tokens": CHUNK,
    "layouts": {"kv": "latent@1", "index": "index@1"},
    "draft": f"mtp:{DEPTH}",
}
SHORT = ("cp2/tp2", "cp2/dp2ep2")
LONG = (
    *("tp2", "tp2ep2", "tp2cs2", "2x", "ep2", "2xep2", "tp2ep4"),
    *("cp2/tp2cs2", "cp4/tp4", "cp4/tp4cs2", "cp4/dp4ep4"),
)
LAYOUTS = SHORT if REQUESTS == FEW else SHORT + LONG
BORDERS = {"cp2/tp2": 20, "cp4/dp4ep4": 20}
"""Steps of fewer prompt tokens are computed as decodes are."""
BESIDE = {"cp2/tp2": 25, "cp2/dp2ep2": 2}
"""Chunks of at least so many tokens have their gathers beside."""
STREAMS, WIDTH = v4.TINY["hc_mult"], v4.TINY["hidden_size"]
ID_BYTES = ELEMENT = 8


@dataclass
class Proposed:
    """What was proposed behind which tokens; the slots of each rank are looked at between steps."""

    tables: list[SlotTable]
    act: Callable[[Engine], None] = lambda engine: None
    found: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)

    def __call__(self, step: int, engine: Engine) -> None:
        for table in self.tables:
            for state in table.states.values():
                if state.proposals:
                    self.found.setdefault(tuple(state.tokens), []).append(state.proposals)
        self.act(engine)


@dataclass
class Lone:
    """One process: what it was asked, said and proposed."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    answers: list[Answer]
    proposed: Proposed


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    layers = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
    v4.save_with_mtp(v4.tiny(31, **layers, num_attention_heads=8, o_groups=4), folder, seed=5)
    return folder


@pytest.fixture(scope="module")
def lone(checkpoint: Path) -> Lone:
    rng = random.Random(3)
    stem = [rng.randrange(3, VOCAB) for _ in range(48)]
    prompts, params = [], []
    for number in range(REQUESTS):
        # Longer than the draft layer's window and its depth: the entry at a hit's end was made with
        # the token that came next for whoever computed it.
        tail = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(12, 40))]
        prompts.append(stem[: rng.choice((0, 32, 48)) if number else 48] + tail)
        params.append(
            SamplingParams(
                temperature=rng.choice((0.0, 0.9)),
                seed=number,
                max_tokens=rng.randrange(6, 14),
                logprobs=0,
            )
        )
    engine = start(checkpoint, concurrency=1, prefix_cache=False, **FIXED)
    proposed = Proposed([engine._executor._slots])  # type: ignore[union-attr]
    return Lone(prompts, params, ask(engine, prompts, params, before_step=proposed), proposed)


class Gathers:
    """Counts what `PromptDrafts` says that it gathers, from the plans alone."""

    def __init__(self, executor: RankExecutor, ranks: int, row_bytes: int) -> None:
        self.bytes, self._ranks, self._row = 0, ranks, row_bytes
        submit = executor.submit

        def counted(plan: StepPlan) -> None:
            for segment in plan.segments:
                if segment.phase is Phase.CHUNK:
                    self.bytes += ranks * (ranks - 1) * self._received(segment)
            submit(plan)

        executor.submit = counted  # type: ignore[method-assign]

    def _received(self, segment: Segment) -> int:
        """Of each other rank: its share of the ends from which drafts go on, as many as the rank
        with the most has; where domains are several, the id behind each run as well."""
        runs = [run for rank in segment.ranks for run in rank.runs]
        rows = sum(len(run.tokens) for run in runs)
        share, at, ends = -(-rows // self._ranks), 0, [0] * self._ranks
        for run in runs:
            at += len(run.tokens)
            ends[(at - 1) // share] += bool(run.proposals)
        ids = len(runs) * ID_BYTES if len(segment.ranks) > 1 else 0
        return max(ends) * self._row + ids


@dataclass
class Late(Pending[Any]):
    """What is forked is done when it is waited for, or something behind it: nothing of it is there
    before."""

    side: LateSide
    work: Callable[[], Any]
    found: Any = None

    def wait(self) -> Any:
        self.side.open -= 1
        self.side.go_on(self)
        return self.found


@dataclass
class LateSide:
    """Where gathers of a shared chunk go, in order; `forks`: how many, `open`: of them not waited
    for."""

    forks: int = 0
    open: int = 0
    left: list[Late] = field(default_factory=list)

    def fork(self, work: Callable[[], Any]) -> Pending[Any]:
        self.forks, self.open = self.forks + 1, self.open + 1
        self.left.append(Late(self, work))
        return self.left[-1]

    def run(self, work: Callable[[], Any]) -> Any:
        self.go_on(None)
        return work()

    def go_on(self, last: Late | None) -> None:
        """Do what is left, up to `last` if it is among it."""
        while self.left and (last is None or any(each is last for each in self.left)):
            first = self.left.pop(0)
            first.found = first.work()


def beside(group: ThreadGroup) -> list[LateSide]:
    """The sides of all ranks, from now on, where their chunks have gathers beside."""
    found = []
    for rank in group.ranks:
        prompts = rank._side.executor._parts.prompts
        if prompts is not None and prompts.beside:
            found.append(LateSide())
            prompts.turns._side = found[-1]
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b23_ranks_propose_what_one_process_proposes(
    layout: str, checkpoint: Path, lone: Lone, rng: random.Random
) -> None:
    with ranks_as_threads() as groups:
        engine = start(
            checkpoint, concurrency=4, parallel=layout, prefill_from=BORDERS.get(layout),
            gathers_beside=BESIDE.get(layout), **FIXED,
        )  # fmt: skip
        executor, (group,) = engine._executor, groups
        sides = beside(group)
        assert isinstance(executor, RankExecutor)
        gathers = Gathers(executor, len(group.ranks), STREAMS * WIDTH * ELEMENT)
        before = executor.moved_bytes.get("drafts", 0)  # by warm-up
        tables = [rank._side.executor._slots for rank in group.ranks]
        proposed = Proposed(tables, making_room(rng))
        answers: list[Answer] = []
        for part in (slice(0, 1), slice(1, None)):  # the first leaves its prompt to be found
            asked = lone.prompts[part], lone.params[part]
            answers += ask(engine, *asked, before_step=proposed)
        moved = executor.moved_bytes.get("drafts", 0) - before
        check_held(engine, group)
    assert bool(sides) == (layout in BESIDE)
    assert all(side.forks > 20 and not side.open for side in sides)
    for answer, wanted in zip(answers, lone.answers, strict=True):
        same(answer, wanted)
    stats = engine.stats()
    assert stats.preemptions > 0 and any(answer.cached_tokens for answer in answers)
    behind = proposed.found.keys() & lone.proposed.found.keys()
    assert len(behind) > 0.9 * len(lone.proposed.found) > 5 * len(answers)
    for tokens in behind:
        (wanted_ids, *_) = lone.proposed.found[tokens]
        for made in proposed.found[tokens]:
            depth = min(len(made), len(wanted_ids))
            assert made[:depth] == wanted_ids[:depth]
    assert moved == (gathers.bytes if "/" in layout else 0)


def check_held(engine: Engine, group: ThreadGroup) -> None:
    """Weights and caches of every rank, the draft layer's with them, are what the plan says."""
    assert engine.resolved is not None
    for kind in ("weights", "kv"):
        planned = sum(row.bytes for row in engine.resolved.plan.ledger if row.kind == kind)
        held = group.call("held_bytes")
        assert [each[kind] for each in held] == [planned] * len(held)
