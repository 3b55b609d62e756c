"""Answers that must be the same: token by token, up to the first near tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from metainfer.core.request import SamplingParams
from metainfer.verifier.rows import FAILED, PASSED, Row
from metainfer.verifier.subject import Answer

ALTERNATIVES = 5


@dataclass(slots=True)
class Comparison:
    """`worst`: the largest difference of a log-probability before any tie, in nats."""

    tie: float
    answers: int = 0
    tokens: int = 0
    ties: int = 0
    worst: float = 0.0
    faults: list[str] = field(default_factory=list)

    def add(self, name: str, answer: Answer, expected: Answer) -> None:
        """One pair. Tokens may part only where `expected` holds both nearly equal; what follows
        answers another text and is not compared."""
        self.answers += 1
        if answer.error or expected.error:
            self.faults.append(f"{name}: {answer.error or expected.error}")
            return
        for at, (mine, theirs) in enumerate(zip(answer.tokens, expected.tokens, strict=False)):
            if mine != theirs:
                if _tied(expected, at, mine, self.tie):
                    self.ties += 1
                else:
                    self.faults.append(f"{name}: token {at} is {mine} instead of {theirs}")
                return
            self.tokens += 1
            self._logprob(name, answer, expected, at)
        if len(answer.tokens) != len(expected.tokens) or answer.finish != expected.finish:
            self.faults.append(
                f"{name}: {len(answer.tokens)} tokens, {answer.finish}, instead of "
                f"{len(expected.tokens)}, {expected.finish}"
            )

    def _logprob(self, name: str, answer: Answer, expected: Answer, at: int) -> None:
        if at < len(answer.logprobs) and at < len(expected.logprobs):
            off = abs(answer.logprobs[at].logprob - expected.logprobs[at].logprob)
            self.worst = max(self.worst, off)
            if not off <= self.tie:
                self.faults.append(f"{name}: log-probability of token {at} is {off:.2g} nats off")

    def row(self, check: str, what: str, sides: tuple[str, str], named: Sequence[str] = ()) -> Row:
        """`sides`: reference, candidate. `named`: what a fault is called."""
        detail = f"{self.tokens} tokens of {self.answers} answers"
        if self.ties:
            detail += f"; {self.ties} part at a near tie"
        return Row(
            check=check,
            what=what,
            verdict=FAILED if self.faults else PASSED,
            reference=sides[0],
            candidate=sides[1],
            error=self.worst,
            tolerance=self.tie,
            unit="nats",
            named=tuple(named) if self.faults else (),
            detail="; ".join(self.faults[:3]) if self.faults else detail,
        )


def greedy(tokens: int) -> SamplingParams:
    """Greedy, with what a comparison needs."""
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, logprobs=ALTERNATIVES, ignore_eos=True
    )


def _tied(expected: Answer, at: int, other: int, tie: float) -> bool:
    if at >= len(expected.logprobs):
        return False
    chosen = expected.logprobs[at]
    return any(token == other and chosen.logprob - logprob <= tie for token, logprob in chosen.top)
