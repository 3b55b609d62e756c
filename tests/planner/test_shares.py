"""What phases weigh where bundles are ranked."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.plan import Limits
from metainfer.core.step import Phase
from metainfer.planner.shares import DECODING, PROMPT_TOKENS, steps, typical

COUNTS = st.integers(1, 1 << 16)


@given(COUNTS, COUNTS, st.integers(1, 512), st.sampled_from(("throughput", "latency")))
def test_steps_make_one_token_of_an_answer_and_its_share_of_prompts(
    chunk: int, mixed: int, running: int, goal: str
) -> None:
    limits = Limits(
        max_context=4096, max_running=running, step_tokens=chunk, mixed_prefill_tokens=mixed,
        max_waiting=1,
    )  # fmt: skip
    held, taken = typical(limits, goal, depth=3, cut=1), steps(limits, goal)
    together = 1 if goal == "latency" else min(DECODING, running)
    assert held[Phase.DECODE] == (together, together) and held[Phase.VERIFY] == (4 * together,) * 2
    made = {phase: Fraction(taken[phase]) * held[phase][0] for phase in taken}
    near = Fraction(1, 10**9)
    assert abs(made[Phase.DECODE] - 1) < near and abs(made[Phase.DRAFT] - 1) < near
    beside = Fraction(taken[Phase.MIXED]) * together
    prompts = made[Phase.CHUNK] + made[Phase.MIXED] - beside
    assert abs(prompts - PROMPT_TOKENS) < near
    assert abs(made[Phase.CHUNK] - Fraction(PROMPT_TOKENS, 2)) < near


def test_ranks_that_share_a_chunk_see_their_part_of_its_rows() -> None:
    limits = Limits(
        max_context=4096, max_running=8, step_tokens=4097, mixed_prefill_tokens=512, max_waiting=1
    )
    assert typical(limits, "throughput", 0, cut=8)[Phase.CHUNK] == (513, 1)
    assert steps(limits, "throughput")[Phase.CHUNK] == PROMPT_TOKENS / 2 / 4097
