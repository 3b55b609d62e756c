"""What a chosen kernel copies of the cache for a chunk, at the limits of the plan."""

from __future__ import annotations

from dataclasses import replace

from metainfer.core.plan import Limits
from metainfer.core.step import Phase
from metainfer.kernels.choice import Choice
from metainfer.kernels.impl import Context
from metainfer.platform.facts import Facts


def copied_bytes(choice: Choice, facts: Facts, limits: Limits, requests: int) -> int:
    """Bytes at most, in a chunk of `requests` requests with the longest context each."""
    request = choice.request
    if choice.impl.copies is None or request.phase not in (Phase.CHUNK, Phase.MIXED):
        return 0
    largest = {
        "rows": limits.step_tokens,
        "seqs": min(requests, limits.step_tokens),
        "context": limits.max_context,
    }
    return choice.impl.copies(Context(replace(request, shape={**request.shape, **largest}), facts))
