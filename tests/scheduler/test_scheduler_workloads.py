"""Random workloads: arrivals, cancels, preemption, shared prefixes, drafts, domains, late results.

Each finished answer must equal the straight line, accounts must be sound after every step, and the
loop must never be stuck with work left (B-28).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from null_world import SHAPES, VOCAB, World, groups_of, request, sizes_of

from metainfer.core.request import FinishReason, Request
from metainfer.core.step import PENDING
from metainfer.kv.book.capacity import longest
from metainfer.scheduler.config import SchedulerConfig


class OracleDrafts:
    """Proposes what the straight line says, wrong with a given chance; deterministic."""

    def __init__(self, accuracy: float, seed: int) -> None:
        self.accuracy, self.random = accuracy, random.Random(seed)
        self.world: World | None = None
        self._answers: dict[str, list[int]] = {}

    def forget(self, request_id: str) -> None: ...

    def propose(self, request: Request, tokens: Sequence[int], limit: int) -> list[int]:
        assert self.world is not None
        name = request.request_id
        if name not in self._answers:
            self._answers[name] = self.world.reference(name)
        at = len(tokens) - len(request.prompt)
        found = self._answers[name][at : at + self.random.randint(0, limit)]
        return [t if self.random.random() < self.accuracy else (t + 1) % VOCAB for t in found]


class OracleProposer(OracleDrafts):
    """The same on the device, where exactly `count` are made."""

    def propose(self, request_id: str, sampled: int, count: int) -> list[int]:  # type: ignore[override]
        assert self.world is not None
        if request_id not in self._answers:
            self._answers[request_id] = self.world.reference(request_id)
        found = (self._answers[request_id] + [0] * (sampled + count))[sampled : sampled + count]
        return [t if self.random.random() < self.accuracy else (t + 1) % VOCAB for t in found]


def play(
    draw: random.Random,
    shape: str,
    *,
    late: bool,
    drafts: int,
    domains: int,
    device: bool = False,
    keep_plans: bool = False,
) -> World:
    """One random workload, to its end."""
    page = {"v4": 8, "grids": 4}.get(shape) or draw.choice([2, 4, 8])
    groups = groups_of(shape, page, page * draw.choice([1, 2]) if shape == "hybrid" else 0)
    max_context = draw.choice([24, 40, 64, 100])
    least = max(g.live_pages(max_context) for g in groups)
    tight = draw.random() < 0.5  # one long answer fills the pool: preemption is the rule
    pages = 1 + (
        least + draw.randint(0, 2) if tight else draw.randint(max(1, least // 2), max(2, 3 * least))
    )
    slots = draw.randint(2, 6) if tight else draw.randint(1, 5)
    sizes = sizes_of(
        groups, pages=pages, slots=slots, snapshots=draw.randint(0, 6), domains=domains
    )
    config = SchedulerConfig(
        max_context=max_context,
        max_running=slots,
        step_tokens=slots + draw.randint(0, 30),
        mixed_prefill_tokens=draw.randint(1, 20),
        max_drafts=drafts,
        model_drafts=device,
        split_phases=draw.random() < 0.3,
        prefill_from=draw.choice([0, 0, 4, 12]),
        adapters={"sql": "digest-1", "law": "digest-2"},
    )
    kind = OracleProposer if device else OracleDrafts
    source = kind(draw.choice([0.0, 0.5, 0.9, 1.0]), draw.randint(0, 99))
    world = World(
        sizes,
        config,
        drafts=source if drafts and not device else None,
        proposer=source if device else None,
        late=late,
    )
    source.world = world
    world.keep_plans = keep_plans
    stems = [[draw.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    chance = 0.2 if tight else 0.8
    live: list[str] = []
    for i in range(draw.randint(3, 14)):
        stem = draw.choice(stems)[: draw.randint(0, 8 if tight else 40)]
        prompt = stem + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        item = request(
            f"r{i}",
            prompt,
            draw.choice([10, 30, 80] if tight else [0, 1, 3, 8, 20]),
            priority=draw.choice([0, 0, 0, 1, 2]),
            cache_salt=draw.choice(["", "", "tenant"]),
            adapter=draw.choice(["", "", "sql", "law"]),
            seed=draw.choice([None, 7]),
            eos_token_ids=(draw.randrange(VOCAB),) if draw.random() < chance else (),
            stop_token_ids=(draw.randrange(VOCAB),) if draw.random() < chance else (),
            ignore_eos=draw.random() < 0.2,
            prompt_logprobs=0 if draw.random() < 0.15 else None,
        )
        error = world.add(item)
        if error is not None:
            total = min(len(prompt) + item.params.max_tokens, max_context)
            too_long = len(prompt) + (item.params.max_tokens > 0) > max_context
            total -= item.params.max_tokens > 0
            assert too_long or total > longest(sizes), f"{error} but it fits"
            continue
        live.append(item.request_id)
        for _ in range(draw.choice([0, 0, 0, 0, 1] if tight else [0, 0, 1, 2, 5])):
            world.step()
        if draw.random() < 0.15:
            world.cancel(draw.choice(live))
    world.run()
    world.check()
    check_rows(world)
    return world


def check_rows(world: World) -> None:
    """Prompt log-probabilities cover each prompt token after the first, once and in order."""
    for name, answer in world.answers.items():
        item = world.requests[name]
        if item.params.prompt_logprobs is None or answer.finish is FinishReason.CANCELLED:
            continue
        assert [token for token, _ in answer.rows] == list(item.prompt[1:]), name


QUICK = settings(
    max_examples=int(os.environ.get("WORKLOADS", "30")),
    deadline=None,
    database=None,
    derandomize="WORKLOADS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
"""`WORKLOADS=2000 pytest ...` soaks with fresh seeds."""


@pytest.mark.parametrize("shape", list(SHAPES))
@QUICK
@given(seed=st.integers(0, 2**48), late=st.booleans())
def test_b28_random_workloads(shape: str, seed: int, late: bool) -> None:
    play(random.Random(seed), shape, late=late, drafts=0, domains=1)


@pytest.mark.parametrize("shape", list(SHAPES))
@QUICK
@given(seed=st.integers(0, 2**48), late=st.booleans(), drafts=st.integers(1, 7))
def test_drafts_never_change_answers(shape: str, seed: int, late: bool, drafts: int) -> None:
    play(random.Random(seed), shape, late=late, drafts=drafts, domains=1)


@pytest.mark.parametrize("shape", list(SHAPES))
@QUICK
@given(seed=st.integers(0, 2**48), late=st.booleans(), drafts=st.integers(1, 7))
def test_drafts_of_the_device_never_change_answers(
    shape: str, seed: int, late: bool, drafts: int
) -> None:
    play(random.Random(seed), shape, late=late, drafts=drafts, domains=1, device=True)


@pytest.mark.parametrize("shape", ["dense", "v4"])
@QUICK
@given(
    seed=st.integers(0, 2**48),
    late=st.booleans(),
    drafts=st.integers(0, 3),
    domains=st.integers(2, 3),
)
def test_domains_never_change_answers(
    shape: str, seed: int, late: bool, drafts: int, domains: int
) -> None:
    play(random.Random(seed), shape, late=late, drafts=drafts, domains=domains)


def test_workloads_exercise_what_they_claim() -> None:
    """The events that make the workloads hard really occur, in number."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        world = play(
            random.Random(seed),
            "v4",
            late=seed % 2 == 1,
            drafts=seed % 3,
            domains=1,
            keep_plans=True,
        )
        counters, manager = world.scheduler.counters, world.kv[0]
        seen["preempted"] += counters.preemptions
        seen["rejected requests"] += counters.rejected
        seen["cancelled"] += counters.cancelled
        seen["hits"] += manager.watch.hits
        seen["accepted drafts"] += counters.accepted_drafts
        seen["refused drafts"] += counters.drafted_tokens - counters.accepted_drafts
        seen["evicted pages"] += sum(pool.evictions for pool in manager.pools)
        seen["evicted snapshots"] += sum(p.evictions for p in manager.snapshots.values())
        for plan in world.plans:
            seen.update(f"move {move.kind}" for move in plan.moves)
            seen.update(f"phase {segment.phase}" for segment in plan.segments)
            runs = [run for s in plan.segments for rank in s.ranks for run in rank.runs]
            seen["placeholders"] += sum(PENDING in run.tokens for run in runs)
        seen.update(f"end {answer.finish}" for answer in world.answers.values())
    wanted = [f"move {kind}" for kind in ("save", "load", "zero")]
    wanted += [f"phase {phase}" for phase in ("chunk", "mixed", "decode", "verify")]
    wanted += [f"end {finish}" for finish in ("stop", "length", "cancelled")]
    wanted += ["preempted", "rejected requests", "cancelled", "hits", "placeholders"]
    wanted += ["accepted drafts", "refused drafts", "evicted pages", "evicted snapshots"]
    assert {name: seen[name] for name in wanted if seen[name] < 10} == {}
