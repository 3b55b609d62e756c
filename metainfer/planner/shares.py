"""What a step of each phase typically holds, and how many of them a token of an answer takes.

Kernels are chosen for the first; bundles of layouts, which all phases share, are ranked by both.
"""

from __future__ import annotations

from collections.abc import Mapping

from metainfer.core.plan import Limits
from metainfer.core.step import Phase

PROMPT_TOKENS = 4
"""Tokens of prompts for each token of an answer (seed)."""
DECODING = 8
"""Sequences that decode together (seed); one where latency is the goal."""


def typical(limits: Limits, goal: str, depth: int, cut: int) -> Mapping[Phase, tuple[int, int]]:
    """Phase -> (tokens, rows that need logits). `depth`: drafts of a sequence; `cut`: ranks that
    share a chunk's rows."""
    decoding = _decoding(limits, goal)
    return {
        Phase.CHUNK: (-(-limits.step_tokens // cut), 1),
        Phase.MIXED: (limits.mixed_prefill_tokens + decoding, decoding),
        Phase.DECODE: (decoding, decoding),
        Phase.VERIFY: (decoding * (1 + depth),) * 2,
        Phase.DRAFT: (decoding, decoding),
    }


def steps(limits: Limits, goal: str) -> Mapping[Phase, float]:
    """Steps of each phase for one token of an answer.

    Half of the prompts' tokens are computed alone, half beside decodes. Answers grow in any of the
    other phases, and each of those counts as if it made them all.
    """
    prompt, answer = PROMPT_TOKENS / 2, 1 / _decoding(limits, goal)
    return {
        Phase.CHUNK: prompt / limits.step_tokens,
        Phase.MIXED: prompt / limits.mixed_prefill_tokens,
        Phase.DECODE: answer,
        Phase.VERIFY: answer,
        Phase.DRAFT: answer,
    }


def _decoding(limits: Limits, goal: str) -> int:
    return 1 if goal == "latency" else min(DECODING, limits.max_running)
