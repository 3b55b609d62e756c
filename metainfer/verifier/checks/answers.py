"""What is reported beside the tokens, and how answers end."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from metainfer.core.request import FinishReason, SamplingParams
from metainfer.verifier.checks.end_to_end import texts
from metainfer.verifier.rows import FAILED, PASSED, Row, bounded
from metainfer.verifier.scoring import score
from metainfer.verifier.subject import Subject

CHECK = "answers"
REPORTED = 1e-4
"""Nats: log-probabilities travel as float32."""


def check(subject: Subject) -> Iterator[Row]:
    if subject.plan.layouts[0].ranks == 1:
        yield _reported(subject)
    yield from _ends(subject)


def _reported(subject: Subject) -> Row:
    """Log-probabilities of the prompt, as reported, against the logits of the same run."""
    text = texts(subject)[0]
    found = score(subject.main, text)
    truth = found.logits.log_softmax(-1)
    following = torch.tensor(text.tokens[1:])
    expected = truth.gather(1, following.unsqueeze(1)).squeeze(1)[: text.prompt - 1]
    mine = torch.tensor(found.reported, dtype=torch.float64)
    named: tuple[str, ...] = ()
    if len(mine) != len(expected):
        off, named = float("inf"), ("number of log-probabilities",)
    else:
        off = float((mine - expected).abs().max()) if len(mine) else 0.0
        if off > REPORTED:
            late = truth[1:].gather(1, following[:-1].unsqueeze(1)).squeeze(1)[: len(mine)]
            early = truth[:-1].gather(1, following[1:].unsqueeze(1)).squeeze(1)[: len(mine) - 1]
            one_off = _mostly(mine[: len(late)], late) or _mostly(mine[1:], early)
            named = ("log-probabilities one row off" if one_off else "log-probabilities",)
    return Row(
        check=CHECK, what="log-probabilities of the prompt", verdict=bounded(off, REPORTED),
        reference="log-softmax of the logits", candidate="as reported", error=off,
        tolerance=REPORTED, unit="nats", named=named,
    )  # fmt: skip


def _mostly(mine: torch.Tensor, others: torch.Tensor) -> bool:
    """Nearly all are equal: a shift leaves something over at a block's end."""
    return bool(((mine - others).abs() <= REPORTED).double().mean() > 0.8)


def _ends(subject: Subject) -> Iterator[Row]:
    """An answer ends at an end token, at a stop id, and at its length; not before `min_tokens`."""
    prompt = subject.noise(min(16, subject.room(24)), 6)
    free = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (answer,) = subject.main.ask([prompt], free)
    end = answer.tokens[min(2, len(answer.tokens) - 1)]
    place = answer.tokens.index(end)
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    stops = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(end,))
    for what, params, eos in (("end of text", plain, (end,)), ("stop id", stops, ())):
        (ended,) = subject.main.ask([prompt], params, eos=eos)
        good = (
            ended.tokens == answer.tokens[:place]
            and ended.finish is FinishReason.STOP
            and ended.stop_token == end
        )
        yield Row(
            check=CHECK, what=what, verdict=PASSED if good else FAILED,
            reference=f"ends before token {place}, which is {end}",
            candidate=f"{len(ended.tokens)} tokens, {ended.finish}",
            named=() if good else (f"{what} ignored",),
        )  # fmt: skip
