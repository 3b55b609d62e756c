"""Before ready, one request as long as the plan promises.

Warm-up runs single steps that end there; this serves every token of it, through the scheduler and
the pages that requests will use.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from metainfer.core.errors import RequestError, UserError
from metainfer.core.request import Request, SamplingParams
from metainfer.scheduler.metrics import Counters

if TYPE_CHECKING:
    from metainfer.engine.engine import Engine

NAME = "limit"


def try_limit(engine: Engine, limit: int, vocab: int, note: Callable[[str], None]) -> None:
    """Serve a random prompt that fills `limit` tokens with its one token of answer.

    Nothing of it stays in the prefix cache or in the scheduler's counters. Where ranks hold caches
    of their own, one of them is tried.

    Raises:
        UserError: it was refused, or met a fault; says which.
    """
    draw = random.Random(0)
    prompt = tuple(draw.randrange(vocab) for _ in range(max(1, limit - 1)))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    scheduler, said, tokens = engine.scheduler, "", 0
    try:
        engine.submit(Request(NAME, prompt, params))
    except RequestError as error:
        said = error.cause
    while engine.has_work:
        for output in engine.step()[0]:
            said, tokens = output.error or said, tokens + len(output.tokens)
        note(f"{scheduler.counters.prompt_tokens:,} of {len(prompt):,} tokens")
    if said or tokens != 1:
        raise UserError(
            f"a prompt of {len(prompt):,} tokens, as the plan promises, got no answer: "
            f"{said or 'it ended without one'}.",
            "Lower --context or --chunk-tokens; metainfer tune capacity MODEL measures what fits.",
            code="limit_failed",
        )
    scheduler.counters = Counters()
    for domain in scheduler.domains:
        domain.kv.flush()
