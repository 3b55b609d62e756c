"""Where two answers may part, how far two distributions are, and when a choice is a near tie."""

from __future__ import annotations

import math

import pytest
import torch

from metainfer.core.request import FinishReason
from metainfer.core.step import TokenLogprobs
from metainfer.verifier.compare import Comparison
from metainfer.verifier.distance import Distance, disagreements, distance, tolerances
from metainfer.verifier.rows import FAILED, PASSED
from metainfer.verifier.scoring import Scored, flips
from metainfer.verifier.subject import Answer

LENGTH = FinishReason.LENGTH


def answer(tokens: list[int], *, second: float = -9.0, best: float = -0.5) -> Answer:
    """Each token with `best`; token + 1 is the alternative, with `second`."""
    reports = [TokenLogprobs(t, best, ((t, best), (t + 1, second)), 1) for t in tokens]
    return Answer(tokens=tokens, logprobs=reports, finish=LENGTH)


def test_equal_answers_pass_and_count() -> None:
    found = Comparison(0.1)
    found.add("a", answer([1, 2, 3]), answer([1, 2, 3]))
    assert (found.tokens, found.ties, found.faults, found.worst) == (3, 0, [], 0.0)
    assert found.row("check", "what", ("one", "other"), ("name",)).named == ()


@pytest.mark.parametrize(("second", "excused"), [(-0.55, True), (-0.65, False)])
def test_answers_part_only_at_a_near_tie(second: float, excused: bool) -> None:
    found = Comparison(0.1)
    found.add("a", answer([1, 3, 9]), answer([1, 2, 7], second=second))
    assert bool(found.faults) is not excused and found.ties == excused
    assert found.tokens == 1  # what follows answers another text
    row = found.row("check", "what", ("one", "other"), ("name",))
    assert (row.verdict, row.named) == ((PASSED, ()) if excused else (FAILED, ("name",)))


def test_a_token_that_is_no_alternative_is_a_fault_however_close() -> None:
    found = Comparison(10.0)
    found.add("a", answer([5]), answer([1], second=-0.5))
    assert found.faults == ["a: token 0 is 5 instead of 1"]


def test_length_end_and_log_probability_count() -> None:
    for mine in (
        answer([1, 2]),
        Answer(tokens=[1, 2, 3], finish=FinishReason.STOP),
        answer([1, 2, 3], best=-0.7),
        Answer(tokens=[], error="no memory"),
    ):
        found = Comparison(0.1)
        found.add("a", mine, answer([1, 2, 3]))
        assert found.faults


def test_distance_is_that_of_log_probabilities() -> None:
    truth = torch.log(torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64))
    mine = torch.log(torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64))
    found = distance(mine, truth, torch.tensor([2]))
    assert found.worst == pytest.approx(math.log(2))
    assert found.mean == pytest.approx(2 * math.log(2) / 4)  # three best and the next token
    assert found.kl == pytest.approx(0.25 * math.log(2))
    shifted = distance(mine + 7.0, mine, torch.tensor([0]))
    assert shifted.mean < 1e-12  # a constant is no distance
    assert distance(mine * float("nan"), truth, torch.tensor([0])).mean == math.inf


def test_best_tokens_may_differ_at_a_tie() -> None:
    truth = torch.tensor([[0.0, -0.05, -9.0], [0.0, -2.0, -9.0]], dtype=torch.float64)
    mine = torch.tensor([[-0.05, 0.0, -9.0], [-2.0, 0.0, -9.0]], dtype=torch.float64)
    assert disagreements(mine, truth, 0.1) == (2, 1)
    assert disagreements(truth, truth, 0.1) == (0, 0)


def test_the_bar_is_the_recipes_distance_or_a_floor() -> None:
    most = tolerances(Distance(0.1, 1.0, 0.01, 8), "float32")
    assert (most.mean, most.worst) == (pytest.approx(0.125), pytest.approx(4.0))
    assert most.kl == pytest.approx(0.01 * 1.25**2)
    floor = tolerances(Distance(0.0, 0.0, 0.0, 8), "float32")
    assert floor.mean == 1e-6 and floor.kl == pytest.approx(1e-12)


def scored(ids: list[list[int]], gaps: list[float]) -> Scored:
    rows = len(ids)
    gap = torch.tensor(gaps, dtype=torch.float64)
    return Scored(torch.zeros(rows, 2), [], {("moe_route", 0): (torch.tensor(ids), gap)})


def test_a_choice_turns_at_a_tie_or_is_wrong() -> None:
    truth = scored([[1, 2], [1, 3], [0, 1], [2, 3]], [1.0, 1e-7, 1.0, 1.0])
    same = scored([[1, 2], [1, 3], [0, 1], [2, 3]], [1.0] * 4)
    tied = scored([[1, 2], [1, 2], [0, 3], [2, 3]], [1.0] * 4)  # row 2 may read what row 1 wrote
    wrong = scored([[0, 2], [1, 2], [0, 1], [2, 3]], [1.0] * 4)
    assert flips(same, truth, 1e-5) == (4, 0)
    assert flips(tied, truth, 1e-5) == (1, 0)
    assert flips(wrong, truth, 1e-5) == (1, 1)
    assert flips(scored([[1, 2]], [1.0]), truth, 1e-5)[1] == 4  # rows are missing
