"""Layouts over rank processes change no token: tensor, data and expert parallel, their mixes, and
pairs that compute prompts another way than decodes.

Float64, as `test_invariance`: one process that computes each request alone is what all are held
against. Drafts, preemption and prefix hits are part of every schedule. Layouts of a model are asked
the same, so that the lone process answers once.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import v4
from harness import Answer, ask, save_tiny, start
from rank_record import keep
from speculation import DEEPEST, FAMILIES, Mixed, drafted_by, pool_bytes
from test_invariance import same

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.request import SamplingParams
from metainfer.core.step import Phase, StepPlan
from metainfer.engine.engine import Engine
from metainfer.engine.machine import open_machine
from metainfer.executor.ranks import RankExecutor
from metainfer.planner.exchange import query_bytes
from metainfer.planner.opening import open_model
from metainfer.workers.group import GroupError
from metainfer.workers.ranks import ProcessGroup

FEW = 12
REQUESTS = int(os.environ.get("RANK_REQUESTS", FEW))  # per layout; 200 by hand, of more layouts
CONTEXT, PAGE, CHUNK, RUNNING = 160, 16, 33, 8
FOLDERS = {"llama": 132, "uneven": 131, "lone": 133, "deepseek-v4": 256}  # and their vocabularies
KV_HEADS = {"llama": 2, "uneven": 3, "lone": 1}  # cut over tensor ranks
TENSOR = re.compile(r"tp(\d)")
EVERY = tuple(  # in a long run also those whose parts are in the cases of a short one
    (family, layout)
    for family, layouts in {
        "llama": "2xtp2 4x tp4 tp4cs2 cp2/tp2 cp4/dp4",
        "lone": "tp2 tp2cs2 tp4 2xtp2cs2 tp4cs2 tp4cs4",
        "uneven": "tp3 2xtp3 cp2/dp2 cp3/tp3",
        "deepseek-v4": "2x tp2 tp2ep2 2xep2 2xtp2 tp4 tp4ep4 ep4 ep8 "
        "tp2ep2cs2 tp4cs2 tp4cs4 tp4ep4cs4 tp2ep4cs2 "
        "cp2/tp2cs2 cp4/dp4ep4 cp4/tp4 cp4/tp4cs2 cp4/tp4cs4",
    }.items()
    for layout in layouts.split()
)
CASES = (
    ("llama", "tp2"),
    ("llama", "2x"),
    ("deepseek-v4", "tp2cs2"),
    ("deepseek-v4", "ep2"),
    ("deepseek-v4", "tp2ep4"),
    ("llama", "cp2/dp2"),
    ("uneven", "tp2"),
    ("uneven", "cp2/tp2"),
    ("deepseek-v4", "cp2/dp2ep2"),
    ("deepseek-v4", "cp2/tp2"),
    *(EVERY if REQUESTS > FEW else ()),
)

TURNS = {
    "tp2": 8, "tp3": 4, "ep2": 5, "ep8": 2, "tp2ep4": 8, "2x": 0,
    "cp2/dp2ep2": 12, "cp2/tp2": 17, "cp4/dp4ep4": 9, "cp2/tp2cs2": 2, "cp4/tp4cs2": 11,
}  # fmt: skip
"""Chunks of at least so many tokens take turns by halves; where their rows are shared, of experts
alone."""
PIECES = {("uneven", "tp2"): 2, ("deepseek-v4", "tp2"): 3, ("deepseek-v4", "tp4"): 2}
"""Of these, shorter ones sum products in pieces from so many tokens on."""


BORDERS = {"cp2/tp2": 14, "cp2/dp2ep2": 10, "cp3/tp3": 1000}
"""Steps of fewer prompt tokens are computed as decodes are, where prompts have their own layout."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in FOLDERS}
    save_tiny("llama", found["llama"], 0, vocab_size=FOLDERS["llama"])
    # 9 query heads over 3 KV heads, as SmolLM2-135M has them; 81 channels; a vocabulary of 131.
    uneven = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    save_tiny("llama", found["uneven"], 3, intermediate_size=81, **uneven)
    # One KV head that 4 query heads read; the last two layers see windows, which are not dealt.
    lone = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 1}
    save_tiny("qwen2", found["lone"], 4, vocab_size=FOLDERS["lone"], **lone)
    layers = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
    v4.save(v4.tiny(21, **layers, num_attention_heads=8, o_groups=4), found["deepseek-v4"])
    return found


def engine_of(folders: dict[str, Path], family: str, **intent: object) -> Engine:
    layouts = {"kv": "latent@1", "index": "index@1"} if family == "deepseek-v4" else {}
    return start(folders[family], dtype="float64", context=CONTEXT, layouts=layouts, **intent)


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, Engine]:
    return {
        family: engine_of(folders, family, concurrency=1, prefix_cache=False)
        for family in {family for family, _ in CASES}
    }


def group_of(engine: Engine) -> ProcessGroup:
    executor = engine._executor
    assert isinstance(executor, RankExecutor) and isinstance(executor._group, ProcessGroup)
    return executor._group


@dataclass
class Asked:
    """What every layout of a family is asked, in batches, with the lone process's answers."""

    stem: list[int]
    batches: list[tuple[list[list[int]], list[SamplingParams], list[Answer]]]


@pytest.fixture(scope="module")
def questions(alone: dict[str, Engine]) -> Callable[[str], Asked]:
    @cache
    def of(family: str) -> Asked:
        rng = random.Random(family)
        stem = [rng.randrange(3, FOLDERS[family]) for _ in range(64)]
        few = family == "deepseek-v4" and REQUESTS == FEW
        size, found = 4 if few else 12, Asked(stem, [])
        for _ in range(-(-REQUESTS // size)):
            prompts, params = drawn(rng, stem, size)
            wanted: list[Answer] = []
            for prompt, each in zip(prompts, params, strict=True):
                wanted += ask(alone[family], [prompt], [each], audit=False)
            found.batches.append((prompts, params, wanted))
        return found

    return of


@pytest.fixture
def closing() -> Iterator[list[Engine]]:
    """Engines whose ranks have to be gone after the test."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        pids = group_of(engine).pids
        engine.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def drawn(
    rng: random.Random, stem: list[int], count: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    vocab = max(stem) + 1
    prompts, params = [], []
    for _ in range(count):
        tail = [rng.randrange(3, vocab) for _ in range(rng.randrange(1, 40))]
        prompts.append(stem[: rng.choice((0, 32, 48, 64))] + tail)
        params.append(
            SamplingParams(
                temperature=rng.choice((0.0, 0.9)),
                seed=rng.randrange(1000),
                max_tokens=rng.randrange(1, 40),
                logprobs=0,
            )
        )
    return prompts, params


def tight(folder: Path, family: str, layout: str) -> int:
    """Cache bytes of a rank for one long sequence and some; hits need more where windows are kept
    for them beside what runs."""
    name = {"uneven": "llama", "lone": "qwen2"}.get(family, family)
    ranks = TENSOR.search(layout)
    (shape,) = [each for each in FAMILIES if each.name == name]
    shape = replace(shape, context=CONTEXT)
    pages, states = (
        pool_bytes(shape, folder, concurrency=n, page_tokens=PAGE, chunk_tokens=CHUNK)
        for n in (1, RUNNING)
    )
    kept, tensor = KV_HEADS.get(family, 1), int(ranks[1]) if ranks else 1
    heads = kept / -(-kept // tensor)  # of one that a rank keeps
    more = 1.6 if family == "deepseek-v4" else 1.05
    if family == "deepseek-v4" and "cs" in layout:
        more = 10  # windows and snapshots are whole, and take most of what is kept for hits
    return int(pages[0] * more / heads) + states[1]


class Turns:
    """Counts steps that compute chunks and decodes by layouts of their own (`both`), and those that
    compute both alike (`mixed`). In a long run it makes the last in order give
    its place up now and then, needed or not; in a short one too few hits would be left."""

    def __init__(self, rng: random.Random, engine: Engine) -> None:
        self._rng, self.both, self.mixed = rng, 0, 0
        executor = engine._executor
        assert isinstance(executor, RankExecutor)
        submit = executor.submit

        def counted(plan: StepPlan) -> None:
            phases = {segment.phase for segment in plan.segments}
            self.both += Phase.CHUNK in phases and len(phases) > 1
            self.mixed += Phase.MIXED in phases
            submit(plan)

        executor.submit = counted  # type: ignore[method-assign]

    def __call__(self, step: int, engine: Engine) -> None:
        if REQUESTS == FEW:
            return
        domain = self._rng.choice(engine.scheduler.domains)
        if domain.running and not domain.running[-1].in_flight and self._rng.random() < 1 / 16:
            engine.scheduler._preempt(domain, domain.running.pop())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "layout"), CASES, ids=["-".join(case) for case in CASES])
def test_layouts_change_no_token(
    family: str,
    layout: str,
    folders: dict[str, Path],
    questions: Callable[[str], Asked],
    rng: random.Random,
    closing: list[Engine],
) -> None:
    engine = engine_of(
        folders,
        family,
        parallel=layout,
        concurrency=RUNNING,
        page_tokens=PAGE,
        chunk_tokens=CHUNK,
        kv_bytes=tight(folders[family], family, layout),
        draft=f"ngram:{DEEPEST}",
        halves=TURNS.get(layout) if "/" not in layout or family == "deepseek-v4" else None,
        sum_pieces=PIECES.get((family, layout)),
        prefill_from=BORDERS.get(layout),
        shared_beside=8 if (family, layout) == ("deepseek-v4", "tp2") else None,
    )
    closing.append(engine)
    source, asked, hits, begin = Mixed(rng, FOLDERS[family]), 0, 0, time.monotonic()
    drafted_by(engine, source)
    turns = Turns(rng, engine)
    for prompts, params, wanted in questions(family).batches:
        for prompt, each, expected in zip(prompts, params, wanted, strict=True):
            source.learn(prompt, each, expected.tokens)
        answers = ask(engine, prompts, params, before_step=turns)
        for answer, expected in zip(answers, wanted, strict=True):
            same(answer, expected)
            asked, hits = asked + 1, hits + (answer.cached_tokens > 0)
    stats = engine.stats()
    # The schedules must have exercised what they are about.
    assert hits > 0 and stats.accepted_drafts > 5, (hits, stats)
    if (family, layout) == CASES[0] or REQUESTS > FEW:
        assert stats.preemptions > 0
    if "/" in layout:
        border = BORDERS.get(layout, 0)
        assert (turns.mixed > 0) == (border > 0), turns.mixed
        if border <= CHUNK:
            assert turns.both > 0  # requests decode by one layout while prompts take the other
            check_moved(engine, layout)
    if "cs" in layout:
        check_dealt(engine)
    keep(
        family=family,
        layout=layout,
        requests=asked,
        generated_tokens=stats.generated_tokens,
        tokens_that_differ=0,  # else it ended above
        requests_with_hits=hits,
        preemptions=stats.preemptions,
        steps=stats.steps,
        steps_of_both_phases=turns.both,
        mixed_steps=turns.mixed,
        accepted_drafts=stats.accepted_drafts,
        moved_bytes=engine._executor.moved_bytes,  # type: ignore[union-attr]
        seconds=round(time.monotonic() - begin, 1),
    )


def check_moved(engine: Engine, layout: str) -> None:
    """Every row of a prompt was cached somewhere, so what ranks gave each other is no less."""
    executor, plan = engine._executor, engine.resolved.plan  # type: ignore[union-attr]
    assert isinstance(executor, RankExecutor)
    moved, held = executor.moved_bytes, group_of(engine).call("held_bytes")
    (paged, *_) = plan.kv_groups
    assert moved["entries"] > 64 * paged.page_bytes // paged.page_tokens
    assert ("edges" in moved) == (plan.model.family == "deepseek_v4")
    # Entries of a domain's requests are lent for later chunks; where every rank has all, none are.
    everywhere = plan.model.family == "deepseek_v4" and "tp" in layout.partition("/")[2]
    assert ("loans" in moved) != everywhere
    planned = sum(row.bytes for row in plan.ledger if row.kind == "weights")
    assert [each["weights"] for each in held] == [planned] * len(held)  # type: ignore[index]


def check_dealt(engine: Engine) -> None:
    """Each rank holds its part of the pages, and sends what the planner prices."""
    executor, resolved = engine._executor, engine.resolved
    assert isinstance(executor, RankExecutor) and resolved is not None
    plan, cost = resolved.plan, resolved.chosen.cost
    assert cost is not None
    moved, layout = executor.moved_bytes, plan.layouts[0]
    planned = sum(row.bytes for row in plan.ledger if row.kind == "kv")
    held = group_of(engine).call("held_bytes")
    assert [each["kv"] for each in held] == [planned] * layout.ranks  # type: ignore[index]
    # Each rank receives the queries of the others' heads; over a group, all but one's. Several
    # groups of a domain each have the whole cache, for heads of their own.
    groups = layout.tensor // layout.shards
    a_token = cost.work.dealt_layers * query_bytes(cost.work) * (layout.shards - 1) * groups
    if (plan.model.family, layout.name) == ("llama", "tp4cs2"):
        a_token *= 4 / 3  # 3 query heads of a KV head over 2 ranks are filled up to 4
    rows = round(moved["queries"] / a_token, 6)
    assert moved["outputs"] == moved["queries"] and rows == int(rows)
    assert rows >= engine.stats().generated_tokens - engine.stats().accepted_drafts - REQUESTS
    assert moved["past"] > 0


def test_every_rank_holds_its_part_once(
    folders: dict[str, Path], closing: list[Engine], alone: dict[str, Engine]
) -> None:
    engine = engine_of(folders, "deepseek-v4", parallel="tp2ep2", concurrency=2)
    closing.append(engine)
    assert engine.resolved is not None
    decided = {each.key: each.value for each in engine.resolved.plan.decisions}
    assert decided["collectives"] == "shm_cpu" and decided["layouts"] == "tp2ep2"
    held = group_of(engine).call("held_bytes")
    rows = engine.resolved.plan.ledger
    for kind in ("weights", "kv"):
        planned = sum(row.bytes for row in rows if row.kind == kind)
        assert [each[kind] for each in held] == [planned, planned]  # type: ignore[index]
    whole = alone["deepseek-v4"].held_bytes["weights"]
    shared = sum(row.bytes for row in rows if row.kind == "weights" and row.share.endswith("/2"))
    assert held[0]["weights"] + shared == whole  # type: ignore[index]


@dataclass
class Pair:
    """Two ranks whose first uses are watched; `ready`: how many lines `uses` had when they were."""

    engine: Engine
    uses: Path
    ready: int

    def since(self) -> list[str]:
        return self.uses.read_text().splitlines()[self.ready :]


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    uses = tmp_path_factory.mktemp("uses") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FIRST_USES", str(uses))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "first_uses"), prepend=os.pathsep)
        wish: dict[str, Any] = {"parallel": "tp2", "concurrency": 4, "chunk_tokens": CHUNK}
        engine = start(folders["llama"], context=CONTEXT, **wish)  # float32, by kernels in C
    pids = group_of(engine).pids
    yield Pair(engine, uses, len(uses.read_text().splitlines()))
    engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_b30_ranks_use_nothing_for_the_first_time_after_ready(pair: Pair) -> None:
    """Drawn requests of every kind, chunks of several lengths, among them several in one step."""
    seen = {int(line.split()[0]) for line in pair.uses.read_text().splitlines()}
    assert seen == set(group_of(pair.engine).pids)  # every rank is watched
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 131) for _ in range(n)] for n in (1, 3, 33, 34, 70, 100, 150)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=2, logprobs=2),
        SamplingParams(temperature=0.8, seed=1, top_k=5, top_p=0.9, min_p=0.01, max_tokens=8),
        SamplingParams(temperature=0.8, seed=2, presence_penalty=0.5, max_tokens=8),
        SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, max_tokens=8),
        SamplingParams(temperature=0.8, seed=4, logit_bias={5: 3.0}, max_tokens=8),
        SamplingParams(temperature=0.0, max_tokens=8, min_tokens=6),
        SamplingParams(temperature=1.0, seed=5, max_tokens=6),
    ]
    for answer in ask(pair.engine, prompts, params):
        assert answer.finish is not None and not answer.error
    assert pair.since() == []


def test_a_killed_rank_ends_the_engine_with_its_name(pair: Pair) -> None:
    engine = pair.engine  # the last test with it
    (answer,) = ask(engine, [[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=2))
    assert len(answer.tokens) == 2
    pid = group_of(engine).pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(GroupError, match="rank 1 failed in submit: rank 1 was killed by SIGKILL"):
        ask(engine, [[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=2))


def test_b17_a_rank_that_plans_otherwise_stops_the_start(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from metainfer.engine import rank

    facts_of = rank.facts_of

    def told(*given: Any) -> dict[str, object]:
        facts = facts_of(*given)
        return {**facts, "plan": {**facts["plan"], "limits.step_tokens": 77}}

    monkeypatch.setattr(rank, "facts_of", told)
    with pytest.raises(GroupError, match=r"limits.step_tokens: 77 on rank 0, \d+ on rank 1"):
        engine_of(folders, "llama", parallel="tp2")


def test_ranks_of_one_host_are_not_promised_its_rates_twice(folders: dict[str, Path]) -> None:
    wish = Intent(model=str(folders["llama"]), parallel="2x")
    found = open_machine().resolve(open_model(str(folders["llama"])), wish)
    rates = {
        each.layout.name: each.prediction.decode_tok_s for each in found.layouts if each.prediction
    }
    assert rates["2x"] is not None and rates["single"] is not None
    assert rates["2x"] <= rates["single"] * 1.01


def test_b26_what_cannot_be_spread_is_refused_before_anything_loads(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(RefusedError) as caught:
        engine_of(folders, "llama", parallel="tp3")
    text = str(caught.value)
    assert "2 KV heads, with their query heads, over 3 ranks, 1 each, leave a rank without" in text
    with pytest.raises(RefusedError, match="KV heads of their own: nothing is held twice"):
        engine_of(folders, "llama", parallel="tp2cs2")
    with pytest.raises(RefusedError, match="3 KV heads, with their query heads, over 5 ranks"):
        engine_of(folders, "uneven", parallel="cp5/tp5")
    with pytest.raises(RefusedError) as caught:
        engine_of(folders, "deepseek-v4", parallel="cp3/tp3")
    text = str(caught.value)
    for reason in ("4 output groups", "256 vocabulary rows", "8 experts"):
        assert f"{reason} do not divide by 3" in text
    told = r"'tp9' does not exist for this model on a CPU. There is: single, .*cp2/dp2.* and so on"
    with pytest.raises(UsageError, match=told):
        engine_of(folders, "llama", parallel="tp9")
    with pytest.raises(UsageError, match="'ep2' does not exist"):
        engine_of(folders, "llama", parallel="ep2")
