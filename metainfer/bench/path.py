"""What a server adds to the steps of its engine: seconds of a request, and of a token on its way.

A lone prompt's first token, less its step; the gap between tokens of several answers, less the step
that made them. What is left is HTTP, the two processes' messages, and the client's own share of the
cores, which a served load has as well.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

from metainfer.bench.client import Server
from metainfer.bench.serve import send
from metainfer.core.errors import UserError
from metainfer.core.step import Phase
from metainfer.planner.calibration import Calibration
from metainfer.planner.steps import StepCost
from metainfer.simulator.outcome import Served
from metainfer.simulator.workload import draw

PROMPT, ANSWER, LONE, TOGETHER = 32, 48, 9, 8
"""Tokens of each prompt and of each long answer, lone requests, answers at once at most."""


@dataclass(frozen=True, slots=True)
class Path:
    """`request_s`: of a request until its engine has it; `token_s`: of a token from there to its
    client."""

    request_s: float
    token_s: float


async def measure(
    server: Server, price: Calibration, cost: StepCost, running: int, seed: int
) -> Path:
    """Serve a few short loads.

    Args:
        price: what steps of this very engine take.
        running: sequences that it decodes at once.

    Raises:
        UserError: the server does not answer as it should, or not every request.
    """
    models = json.loads(await server.get("/v1/models"))
    model, vocab = models["data"][0]["id"], cost.work.vocab
    several = min(TOGETHER, running)
    lone = f"closed:concurrency=1,requests={LONE},prompt={PROMPT},output=1"
    many = f"closed:concurrency={several},requests={several},prompt={PROMPT},output={ANSWER}"
    firsts, gaps = [], []
    for turn in range(3):
        served = _answered(await send(server, model, draw(lone, vocab, seed + turn)))
        firsts += [each.times[0] - each.arrived_s for each in served]
        gaps += _gaps(_answered(await send(server, model, draw(many, vocab, seed + 100 + turn))))
    chunk = price(Phase.CHUNK, cost.runs([(0, PROMPT)], scored=1))
    reach = PROMPT + ANSWER // 2
    step = price(Phase.DECODE, cost.runs([(reach, 1)] * several, scored=several))
    return Path(
        max(0.0, statistics.median(firsts) - chunk),
        max(0.0, statistics.median(gaps) - step) / several if gaps else 0.0,
    )


def _answered(served: list[Served]) -> list[Served]:
    """All of them, or the first cause: what failed must not count as nothing added."""
    failed = next((each for each in served if each.error or not each.times), None)
    if failed is not None:
        raise UserError(
            f"the server under measurement did not answer: {failed.error or 'no token came'}.",
            f"It needs a context of {PROMPT + ANSWER} tokens; see its lines above.",
            code="bad_answer",
        )
    return served


def _gaps(served: list[Served]) -> list[float]:
    """Between tokens while every answer is under way."""
    begin = max(each.times[0] for each in served)
    end = min(each.times[-1] for each in served)
    return [
        after - before
        for each in served
        for before, after in zip(each.times, each.times[1:], strict=False)
        if begin <= before and after <= end
    ]
