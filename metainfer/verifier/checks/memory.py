"""The promised limits hold: a request of the longest context runs, one token more is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator

from metainfer.core.errors import RequestError
from metainfer.verifier.compare import greedy
from metainfer.verifier.rows import FAILED, PASSED, Row, bounded, skipped
from metainfer.verifier.subject import Subject

CHECK = "memory"
SECONDS = 30.0
"""What the request at the limit may take; a slower machine runs as much of it as that allows,
and says so."""
PROBE, ANSWER = 64, 2
SHARE = 0.02
"""Of the ledger, that what is held may differ by."""


def check(subject: Subject) -> Iterator[Row]:
    yield from _ledger(subject)
    yield from _longest(subject)
    yield _beyond(subject)


def _ledger(subject: Subject) -> Iterator[Row]:
    planned: dict[str, int] = {}
    for row in subject.plan.ledger:
        planned[row.kind] = planned.get(row.kind, 0) + row.bytes
    for kind, held in subject.main.engine.held_bytes.items():
        promised = planned.get(kind, 0)
        off = abs(held - promised) / max(promised, 1)
        yield Row(
            check=CHECK, what=f"{kind} held", verdict=bounded(off, SHARE), error=off,
            tolerance=SHARE, unit="of the ledger", reference=f"ledger: {promised:,} B",
            candidate=f"held: {held:,} B", named=() if off <= SHARE else ("memory ledger",),
        )  # fmt: skip


def _longest(subject: Subject) -> Iterator[Row]:
    limit = int(subject.plan.limits.max_context)
    subject.say(f"  a request near the limit of {limit:,} tokens ...")
    probe = min(PROBE, max(1, limit - ANSWER))
    begin = time.monotonic()
    subject.main.ask([subject.noise(probe, 8)], greedy(1))
    each = (time.monotonic() - begin) / probe
    # A longer prompt attends to more: half as much again for each token.
    affordable = max(probe, int(SECONDS / (1.5 * each)))
    tokens = max(1, min(limit - ANSWER, affordable))
    (answer,) = subject.main.ask([subject.noise(tokens, 9)], greedy(ANSWER))
    good = not answer.error and len(answer.tokens) == min(ANSWER, limit - tokens)
    whole = tokens == limit - ANSWER
    yield Row(
        check=CHECK, what="a long request" if not whole else "a request at the limit",
        verdict=PASSED if good else FAILED,
        reference=f"a context of {limit:,} tokens is promised",
        candidate=f"prompt of {tokens:,} tokens, {len(answer.tokens)} more",
        named=() if good else ("context limit",), detail=answer.error,
    )  # fmt: skip
    if not whole:
        why = f"{tokens:,} of {limit:,} tokens ran: more would take over {SECONDS:.0f} s here"
        yield skipped(CHECK, "a request at the limit", why)


def _beyond(subject: Subject) -> Row:
    limit = int(subject.plan.limits.max_context)
    refused = ""
    try:
        subject.main.ask([[1] * (limit + 1)], greedy(1))
    except RequestError as error:
        refused = error.cause
    return Row(
        check=CHECK, what="a request beyond the limit", verdict=PASSED if refused else FAILED,
        reference="refused", candidate="refused" if refused else "accepted",
        named=() if refused else ("context limit",), detail=refused,
    )  # fmt: skip
