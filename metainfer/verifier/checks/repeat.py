"""The same question twice gives the same bits; a captured step gives what its ops give."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from metainfer.core.request import SamplingParams
from metainfer.verifier.checks.end_to_end import texts
from metainfer.verifier.rows import FAILED, PASSED, Row, skipped
from metainfer.verifier.scoring import score
from metainfer.verifier.subject import Answer, Subject

DETERMINISM, GRAPHS, ANSWER = "determinism", "graphs", 16


def determinism(subject: Subject) -> Iterator[Row]:
    subject.say("  the same twice ...")
    if subject.plan.layouts[0].ranks == 1:
        text = texts(subject)[-1]
        first, second = (score(subject.main, text).logits for _ in range(2))
        off = int((first != second).sum())
        yield Row(
            check=DETERMINISM, what="logits", error=float(off), tolerance=0.0, unit="values",
            verdict=PASSED if torch.equal(first, second) else FAILED,
            reference="the first run", candidate="the second", named=("run to run",) if off else (),
        )  # fmt: skip
    prompt = subject.noise(subject.room(24 + ANSWER) - min(ANSWER, subject.room(ANSWER) // 2), 5)
    params = _drawn(1)
    one, two = (_ask(subject, prompt, params) for _ in range(2))
    same = one.tokens == two.tokens and one.logprobs == two.logprobs
    yield Row(
        check=DETERMINISM, what="seeded answers", verdict=PASSED if same else FAILED,
        reference="the first run", candidate="the second",
        named=() if same else ("run to run",), detail=f"{len(one.tokens)} tokens",
    )  # fmt: skip
    others = [_ask(subject, prompt, _drawn(seed)).tokens for seed in range(2, 8)]
    moved = any(tokens != one.tokens for tokens in others)
    yield Row(
        check=DETERMINISM, what="the seed counts", verdict=PASSED if moved else FAILED,
        reference="one seed", candidate="six others, at temperature 1.5",
        named=() if moved else ("seed",),
    )  # fmt: skip


def _drawn(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.5, seed=seed, max_tokens=ANSWER, logprobs=0, ignore_eos=True
    )


def _ask(subject: Subject, prompt: list[int], params: SamplingParams) -> Answer:
    return subject.main.ask([prompt], params)[0]


def graphs(subject: Subject) -> Iterator[Row]:
    buckets = subject.plan.graph_buckets
    if not buckets:
        yield skipped(GRAPHS, "captured against eager", "the plan captures no steps")
        return
    if subject.plan.layouts[0].ranks > 1:
        why = "ranks in other processes cannot be told to run op by op"
        yield skipped(GRAPHS, "captured against eager", why)
        return
    subject.say("  captured against eager ...")
    text = texts(subject)[0]
    captured = score(subject.main, text).logits
    with subject.main.engine.eager():
        eager = score(subject.main, text).logits
    off = int((captured != eager).sum())
    yield Row(
        check=GRAPHS, what="logits of captured steps", error=float(off), tolerance=0.0,
        unit="values", verdict=FAILED if off else PASSED, reference="op by op",
        candidate=f"graphs of {', '.join(map(str, buckets))}", named=("graph",) if off else (),
    )  # fmt: skip
