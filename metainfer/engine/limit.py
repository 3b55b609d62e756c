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

if TYPE_CHECKING:
    from metainfer.engine.engine import Engine

NAME = "limit"


def try_limit(engine: Engine, limit: int, vocab: int, note: Callable[[str], None]) -> None:
    """Serve random prompts that fill `limit` tokens with their one token of answer: one for each
    cache that ranks hold of their own, all at once.

    Raises:
        UserError: one was refused, or met a fault; says which.
    """
    draw, scheduler = random.Random(0), engine.scheduler
    length, domains = max(1, limit - 1), len(scheduler.domains)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    said, tokens = "", 0
    try:
        for domain in range(domains):
            prompt = tuple(draw.randrange(vocab) for _ in range(length))
            engine.submit(Request(f"{NAME} {domain}", prompt, params))
    except RequestError as error:
        said = error.cause
    while engine.has_work:
        for output in engine.step()[0]:
            said, tokens = output.error or said, tokens + len(output.tokens)
        note(f"{scheduler.counters.prompt_tokens:,} of {domains * length:,} tokens")
    if said or tokens != domains:
        raise UserError(
            f"a prompt of {length:,} tokens, as the plan promises, got no answer: "
            f"{said or 'it ended without one'}.",
            "Lower --context or --chunk-tokens; metainfer tune capacity MODEL measures what fits.",
            code="limit_failed",
        )
