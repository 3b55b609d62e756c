"""Ranks agree: the plan's layout gives what one rank gives."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.verifier.checks.invariance import ANSWER, alone, prompts
from metainfer.verifier.compare import Comparison
from metainfer.verifier.rows import Row, skipped
from metainfer.verifier.subject import Subject

CHECK = "ranks"


def check(subject: Subject) -> Iterator[Row]:
    layout = subject.plan.layouts[0]
    if layout.ranks == 1:
        yield skipped(CHECK, "rank agreement", "one rank")
        return
    subject.say("  one rank beside them ...")
    listed = prompts(subject)
    expected_by = "one rank"
    answers = alone(subject.main, listed, ANSWER)
    with subject.engine(parallel="single") as running:
        expected = alone(running, listed, ANSWER)
    found = Comparison(subject.tie)
    for number, (mine, theirs) in enumerate(zip(answers, expected, strict=True)):
        found.add(f"prompt {number}", mine, theirs)
    yield found.row(
        CHECK, "rank agreement", (expected_by, f"{layout.name}, {layout.ranks} ranks"), ("ranks",)
    )
