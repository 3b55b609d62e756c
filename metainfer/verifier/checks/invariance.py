"""What must not change an answer: neighbours, chunks, cached prefixes, reused pages, preemption.

The reference is each request alone, in this engine. Kernels whose sums depend on the batch may
part at a near tie (class ``native``); whatever parts elsewhere is a fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from metainfer.kernels.table import Trace
from metainfer.verifier.compare import Comparison, greedy
from metainfer.verifier.probe import Tap
from metainfer.verifier.reference import reference_of, swaps
from metainfer.verifier.rows import FAILED, NOT_APPLICABLE, PASSED, Row
from metainfer.verifier.subject import Answer, Running, Subject
from metainfer.verifier.weights import Weights

CHECK = "invariance"
ALONE = "each request alone"
LONG, SHORT, ANSWER = 72, 40, 12


def prompts(subject: Subject) -> list[list[int]]:
    """A few, the first two alike for their larger part."""
    room = subject.room(LONG + ANSWER) - ANSWER
    long, short = max(2, min(LONG, room)), max(2, min(SHORT, room))
    first = subject.noise(long, 2)
    second = [*first[: long // 2], *subject.noise(long - long // 2, 3)]
    return [first, second, subject.noise(short, 4), (subject.words(short) or [1, 2])[:short]]


def alone(running: Running, listed: list[list[int]], tokens: int) -> list[Answer]:
    return [running.ask([prompt], greedy(tokens))[0] for prompt in listed]


def check(subject: Subject, weights: Weights) -> Iterator[Row]:
    subject.say("  neighbours, prefixes, reused pages ...")
    listed = prompts(subject)
    room = int(subject.plan.limits.max_context)
    tokens = min(ANSWER, max(1, room - max(len(prompt) for prompt in listed)))
    expected = alone(subject.main, listed, tokens)
    yield _together(subject, listed, expected, tokens)
    yield from _prefixes(subject, listed, expected, tokens)
    yield _reused(subject, weights, listed, tokens)
    yield _tight(subject, listed, expected, tokens)


def _compare(subject: Subject, answers: list[Answer], expected: list[Answer]) -> Comparison:
    found = Comparison(subject.tie)
    for number, (mine, theirs) in enumerate(zip(answers, expected, strict=True)):
        found.add(f"prompt {number}", mine, theirs)
    return found


def _together(
    subject: Subject, listed: list[list[int]], expected: list[Answer], tokens: int
) -> Row:
    many = [*listed, *listed]
    answers = subject.main.ask(many, greedy(tokens))
    found = _compare(subject, answers, [*expected, *expected])
    return found.row(CHECK, "neighbours", (ALONE, "all at once"), ("neighbours",))


def _prefixes(
    subject: Subject, listed: list[list[int]], expected: list[Answer], tokens: int
) -> Iterator[Row]:
    """Found prefixes change nothing, and are found under their own salt alone."""
    if not subject.plan.prefix_cache:
        why = "the plan reuses no prefixes"
        yield Row(check=CHECK, what="cached prefix", verdict=NOT_APPLICABLE, detail=why)
        return
    ask = subject.main.ask
    ask([listed[0]], greedy(tokens), salt="one tenant")
    again = [ask([prompt], greedy(tokens), salt="one tenant")[0] for prompt in listed[:2]]
    found = _compare(subject, again, expected[:2])
    hits = sum(answer.cached_tokens for answer in again)
    row = found.row(CHECK, "cached prefix", (ALONE, f"{hits} tokens found"), ("prefix hit",))
    page = max(group.page_tokens for group in subject.plan.kv_groups)
    long_enough = len(listed[0]) > page
    if not hits and not long_enough:
        row = Row(
            check=CHECK, what="cached prefix", verdict=NOT_APPLICABLE,
            detail="the context is shorter than a page",
        )  # fmt: skip
    yield row
    (other,) = ask([listed[0]], greedy(tokens), salt="another tenant")
    yield Row(
        check=CHECK, what="prefix of another salt", error=float(other.cached_tokens),
        verdict=FAILED if other.cached_tokens else PASSED, tolerance=0.0, unit="tokens found",
        reference="nothing is found", candidate="the same prompt under another salt",
        named=("prefix hit across salts",) if other.cached_tokens else (),
    )  # fmt: skip


def _reused(subject: Subject, weights: Weights, listed: list[list[int]], tokens: int) -> Row:
    """Pages that others have filled before hold nothing of them: in an engine whose cache is hardly
    larger than one request, every page is used again."""
    first, second = _twice(subject, listed, tokens)
    found = _compare(subject, second, first)
    sides = ("fresh pages", "pages that others have filled")
    if not found.faults or subject.plan.layouts[0].ranks > 1:
        return found.row(CHECK, "reused pages", sides, ("page reuse",))
    subject.say("  pages keep something; looking for the op that heals it ...")
    trace: Trace = subject.main.probe
    healing = []
    for site in dict.fromkeys(site for _, site, _ in trace.calls if site != "sample"):
        swap = swaps(subject, weights, reference_of, [site])
        first, second = _twice(subject, listed, tokens, swap)
        if not _compare(subject, second, first).faults:
            healing.append(site)
    names = ("page reuse", *(f"op {site}" for site in healing))
    row = found.row(CHECK, "reused pages", sides, names)
    return dataclasses.replace(row, where=tuple(healing))


def _twice(
    subject: Subject, listed: list[list[int]], tokens: int, *taps: Tap
) -> tuple[list[Answer], list[Answer]]:
    """All prompts one by one, and all once more, in an engine of its own."""
    with subject.engine(**_small(subject, 1)) as running, running.probe.tapped(*taps):
        return alone(running, listed, tokens), alone(running, listed, tokens)


def _tight(subject: Subject, listed: list[list[int]], expected: list[Answer], tokens: int) -> Row:
    """Small chunks, and a cache too small for all at once."""
    with subject.engine(**_small(subject, len(listed))) as running:
        answers = running.ask(listed, greedy(tokens))
        preempted = running.engine.stats().preemptions
    found = _compare(subject, answers, expected)
    candidate = f"chunks of {len(listed) + 12} tokens, {preempted} preemptions"
    return found.row(CHECK, "chunks and preemption", (ALONE, candidate), ("chunks or preemption",))


def _small(subject: Subject, running: int) -> dict[str, Any]:
    """An intent with little room: a context as needed, a cache for one and a half requests."""
    tokens = min(LONG + 2 * ANSWER, int(subject.plan.limits.max_context))
    page = max(group.page_tokens for group in subject.plan.kv_groups)
    context = min(-(-tokens // page) * page, int(subject.plan.limits.max_context))
    more: dict[str, Any] = {"context": context, "concurrency": running, "kv_bytes": None}
    if running > 1:
        more |= {"chunk_tokens": running + 12, "kv_bytes": _bytes(subject, context, running)}
    return more


def _bytes(subject: Subject, context: int, running: int) -> int:
    """Cache bytes for one and a half requests of `context` tokens, with every slot's state."""
    total = 0.0
    for group in subject.plan.kv_groups:
        if group.page_tokens:
            pages = -(-context // group.page_tokens)
            total += (1.5 * pages + 2 + running) * group.page_bytes
        total += (running + 1) * group.slot_bytes + group.snapshots * group.snapshot_bytes
    return int(total)
