"""Decode steps over a cache that is dealt over ranks, captured: the same tokens, and every byte
that came from the other rank is counted.

Ranks are threads of this process. A replay is the step's Python once more (`statics.again`), and
what that counts is taken back, as a card's graph counts nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from harness import ask, save_tiny, start
from speculation import Mixed, drafted_by
from statics import Again, capture_steps
from thread_ranks import ranks_as_threads

from metainfer.core.plan import StepGraph
from metainfer.core.request import SamplingParams
from metainfer.core.step import Phase
from metainfer.executor.graphs import Capture, Replayed, StaticOutput, StaticSteps, Step
from metainfer.executor.local import LocalExecutor

RUNS, DEPTH, HEADS, WIDTH, VOCAB = 4, 3, 4, 8, 133
ROWS = {Phase.DECODE: RUNS, Phase.VERIFY: RUNS * (1 + DEPTH)}
SHAPES = [StepGraph(phase=phase.value, tokens=rows, runs=RUNS) for phase, rows in ROWS.items()]


class Uncounted(Again):
    """`moved` is left as it was."""

    moved: Counter[str]

    def replay(self) -> None:
        before = Counter(self.moved)
        super().replay()
        self.moved.clear()
        self.moved.update(before)


def uncounted(moved: Counter[str]) -> Capture:
    def capture(step: Step) -> tuple[Replayed, StaticOutput]:
        out = step()
        graph = Uncounted(step, out)
        graph.moved = moved
        return graph, out

    return capture  # type: ignore[return-value]


def test_steps_over_parts_are_replayed_and_counted(tmp_path: Path) -> None:
    """One layer of three is dealt: the others have windows. A rank has half of the heads. Drafts,
    hits, chunks and decodes side by side; first op by op, then replayed."""
    shape = {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 1}
    save_tiny("qwen2", tmp_path, 4, vocab_size=VOCAB, **shape)
    rng = random.Random(5)
    stem = [rng.randrange(3, VOCAB) for _ in range(48)]
    prompts = [
        stem[:kept] + [rng.randrange(3, VOCAB) for _ in range(9)] for kept in (48, 0, 32, 17)
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 14, 6, 12)
    ]
    fixed: dict[str, Any] = {"dtype": "float64", "context": 96, "page_tokens": 16}
    alone = start(tmp_path, **fixed, concurrency=1, prefix_cache=False)
    wanted = [answer.tokens for answer in ask(alone, prompts, params)]
    alone.close()
    source = Mixed(rng, VOCAB)
    for prompt, each, answer in zip(prompts, params, wanted, strict=True):
        source.learn(prompt, each, answer)
    with ranks_as_threads() as groups:
        engine = start(
            tmp_path, **fixed, parallel="tp2cs2", concurrency=RUNS, chunk_tokens=32,
            draft=f"ngram:{DEPTH}",
        )  # fmt: skip
        drafted_by(engine, source)
        plain = ask(engine, prompts, params)
        (group,) = groups
        executors = [rank._side.executor for rank in group.ranks]

        def capture(rank: int) -> StaticSteps:
            executor = executors[rank]
            assert isinstance(executor, LocalExecutor)
            return capture_steps(executor, SHAPES, uncounted(executor._parts.model.dealt.moved))

        steps = group.each(capture)
        before = [executor.moved_bytes for executor in executors]
        replayed = ask(engine, prompts, params)
        after = [executor.moved_bytes for executor in executors]
        engine.close()
    assert [answer.tokens for answer in plain] == wanted
    assert [answer.tokens for answer in replayed] == wanted
    assert [answer.cached_tokens > 0 for answer in replayed] == [True, False, True, True]
    for made, old, new in zip(steps, before, after, strict=True):
        assert set(made.replays) == {Phase.DECODE, Phase.VERIFY}
        rows = sum(count * ROWS[phase] for phase, count in made.replays.items())
        half = HEADS // 2 * WIDTH * 8  # bytes of a row's heads of the other rank
        assert new["queries"] - old["queries"] == new["outputs"] - old["outputs"] == rows * half
        assert new["logs"] - old["logs"] == rows * HEADS * 8
