"""Drafts change no token: the plan with its drafts against the same plan without."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.core.request import SamplingParams
from metainfer.verifier.checks.invariance import ANSWER, prompts
from metainfer.verifier.compare import ALTERNATIVES, Comparison
from metainfer.verifier.rows import Row, skipped
from metainfer.verifier.subject import Subject

CHECK = "speculation"


def check(subject: Subject) -> Iterator[Row]:
    draft = subject.plan.draft
    if not draft.depth:
        yield skipped(CHECK, "drafts change no token", "the plan drafts nothing")
        return
    subject.say("  without drafts ...")
    # Repetition gives a drafter of seen tokens something to propose.
    listed = [(prompt * 3)[: subject.room(72)] for prompt in prompts(subject)]
    tokens = min(2 * ANSWER, max(1, int(subject.plan.limits.max_context) - len(listed[0])))
    params = [
        SamplingParams(
            temperature=temperature, seed=5, max_tokens=tokens, logprobs=ALTERNATIVES,
            ignore_eos=True,
        )
        for temperature in (0.0, 0.0, 0.8, 0.8)
    ]  # fmt: skip
    before = subject.main.engine.stats().drafted_tokens
    drafted = subject.main.ask(listed, params)
    proposed = subject.main.engine.stats().drafted_tokens - before
    with subject.engine(draft="off") as running:
        plain = running.ask(listed, params)
    found = Comparison(subject.tie)
    for number, (mine, theirs) in enumerate(zip(drafted, plain, strict=True)):
        found.add(f"prompt {number}", mine, theirs)
    candidate = f"{draft.method}:{draft.depth}, {proposed} tokens drafted"
    yield found.row(
        CHECK, "drafts change no token", ("decoded token by token", candidate),
        ("acceptance of drafts",),
    )  # fmt: skip
