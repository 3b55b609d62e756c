"""The simulator against prices by hand, and the scheduler's promises under load (B-28, B-29)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import VOCAB, price, world

from metainfer.core.errors import RefusedError
from metainfer.core.step import Phase
from metainfer.planner.amounts import Amounts
from metainfer.simulator.outcome import Served, compared, percentile, summary
from metainfer.simulator.run import simulate
from metainfer.simulator.workload import Job, Workload, draw


def jobs(*made: Job, concurrency: int = 0) -> Workload:
    return Workload(spec="by hand", seed=0, jobs=made, concurrency=concurrency)


def test_one_request_by_hand() -> None:
    """100 prompt rows, then 4 decodes of one row; the first token comes with the prompt."""
    prompt = tuple(range(20, 120))
    found = simulate(world(request_s=0.5), jobs(Job(prompt=prompt, output=5, at_s=1.0)))
    (served,) = found.served
    first = 1.0 + 0.5 + 0.01 + 0.1
    assert served.times == pytest.approx([first + 0.011 * i for i in range(5)])
    told = found.to_json()
    assert told["ttft_s"]["p50"] == pytest.approx(0.61)  # type: ignore[index]
    assert told["itl_s"]["p95"] == pytest.approx(0.011)  # type: ignore[index]
    assert told["output_tok_s"] == pytest.approx(5 / (first - 1.0 + 0.044))
    assert (found.phase_steps, found.steps) == ({"chunk": 1, "decode": 4}, 5)


def test_requests_of_one_moment_reach_the_engine_one_after_the_other() -> None:
    """A server reads them in turn: the first starts a step alone, and the others join the next."""
    made = jobs(*[Job(prompt=(i + 20,) * 100, output=1, at_s=0.0) for i in range(3)])
    waits = [each.times[0] for each in simulate(world(request_s=0.02, mixed=256), made).served]
    first = 0.02 + 0.01 + 0.1
    assert waits == pytest.approx([first, first + 0.01 + 0.2, first + 0.01 + 0.2])
    at_once = [each.times[0] for each in simulate(world(), made).served]
    assert at_once[0] == pytest.approx(0.01 + 0.256)  # a step of 256 tokens holds two and a half


def test_tokens_cost_their_way_to_the_client() -> None:
    prompt = tuple(range(20, 120))
    made = jobs(*[Job(prompt=prompt, output=5, at_s=0.0), Job(prompt=prompt, output=5, at_s=0.0)])
    found = simulate(world(token_s=0.003, caching=False), made)
    for served in found.served:
        gaps = [b - a for a, b in itertools.pairwise(served.times)]
        assert gaps == pytest.approx([0.012 + 2 * 0.003] * 4)


def test_a_closed_loop_queues() -> None:
    """Two places: the third request arrives when the first ends, and waits for nothing else."""
    made = [Job(prompt=(i + 20,) * 10, output=3) for i in range(3)]
    found = simulate(world(), jobs(*made, concurrency=2))
    first, _, third = found.served
    assert first.arrived_s == 0.0 and third.arrived_s == first.times[-1]
    waits = [each.times[0] - each.arrived_s for each in found.served]
    assert waits == pytest.approx([0.03, 0.03, 0.02])


def test_a_shared_prefix_is_found_again() -> None:
    spec = "shared:concurrency=1,requests=4,prefix=64,groups=1,prompt=8,output=2"
    hit = simulate(world(), draw(spec, VOCAB)).to_json()
    assert hit["hit_rate"] == pytest.approx(3 * 64 / (4 * 72))
    assert hit["cached_tokens"] == 3 * 64
    cold = simulate(world(caching=False), draw(spec, VOCAB)).to_json()
    assert not cold["hit_rate"]
    assert cold["ttft_s"]["p50"] > hit["ttft_s"]["p50"]  # type: ignore[index]


def test_a_session_finds_its_own_answers() -> None:
    """Every full page before a turn's new tokens is found, answers of earlier turns included."""
    spec = "agentic:concurrency=1,turns=3,prompt=64,step=16,output=33,think=1"
    found = simulate(world(), draw(spec, VOCAB))
    assert [each.prompt for each in found.served] == [64, 113, 162]
    assert [each.cached for each in found.served] == [0, 96, 144]


def test_pages_that_run_out_preempt_and_all_is_served() -> None:
    crowd = jobs(*[Job(prompt=(i + 20,) * 30, output=60, at_s=0.0) for i in range(6)])
    tight = simulate(world(running=6, pages=22), crowd)
    roomy = simulate(world(running=6, pages=400), crowd)
    assert tight.preemptions > 0 == roomy.preemptions
    assert all(each.output == 60 for each in tight.served)
    assert tight.kv_used > roomy.kv_used


def test_b29_long_prompts_do_not_freeze_short_answers() -> None:
    """8 prompts of 3,000 tokens beside 8 streams: no gap beyond a mixed step, and the prompts take
    at most a quarter longer than alone."""
    running = {"running": 16, "pages": 4000, "step": 256, "mixed": 64, "context": 4000}
    long = [Job(prompt=(40 + i,) * 3000, output=1, at_s=1.0) for i in range(8)]
    short = [Job(prompt=(20 + i,) * 8, output=900, at_s=0.0) for i in range(8)]

    def flat(phase: Phase, amounts: Amounts) -> float:
        """Rows alone cost, as in a model that computes more than it reads."""
        return 0.0001 * amounts.rows

    both = simulate(world(price=flat, **running), jobs(*short, *long))
    alone = simulate(world(price=flat, **running), jobs(*long))
    assert both.longest_gap_s <= 0.0001 * (64 + 8) + 1e-9
    ends = [max(each.times[-1] for each in found.served[-8:]) - 1.0 for found in (both, alone)]
    assert ends[0] <= 1.25 * ends[1]


def test_b28_what_can_never_run_is_refused_with_numbers() -> None:
    with pytest.raises(RefusedError, match=r"request 1 .* context of 64 tokens"):
        simulate(
            world(context=64),
            jobs(Job(prompt=(20,), output=1, at_s=0.0), Job(prompt=(20,) * 90, output=1, at_s=0.0)),
        )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 80), st.integers(1, 30), st.floats(0, 3)), min_size=1, max_size=12
    ),
    st.integers(8, 40),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_b28_every_workload_ends_and_time_is_accounted(
    shapes: list[tuple[int, int, float]], pages: int, running: int, domains: int
) -> None:
    made = [
        Job(prompt=tuple((i * 31 + j) % VOCAB for j in range(prompt)), output=output, at_s=at)
        for i, (prompt, output, at) in enumerate(shapes)
    ]
    found = simulate(world(running=running, pages=pages, domains=domains), jobs(*made))
    for job, served in zip(made, found.served, strict=True):
        assert served.output == job.output and served.arrived_s == job.at_s
        assert served.times == sorted(served.times) and served.times[0] > served.arrived_s
        rows = min(len(job.prompt), 256)
        least = price(Phase.CHUNK, Amounts(rows - (served.cached or 0), 0, 0, 0))
        assert served.times[0] - served.arrived_s >= least - 1e-9
    assert sum(found.phase_steps.values()) == found.steps


def test_more_load_never_shortens_the_first_token() -> None:
    spec = "closed:concurrency={},requests=32,prompt=100,output=20"
    waits = []
    for places in (1, 2, 4, 8, 16):
        found = simulate(world(running=4), draw(spec.format(places), VOCAB)).to_json()
        waits.append(found["ttft_s"]["p95"])  # type: ignore[index]
    assert waits == sorted(waits)


def test_drafts_come_several_at_once() -> None:
    """Every draft accepted: 1 + 4 tokens a step, so 21 tokens take the prompt and four steps."""
    sure = simulate(
        world(drafts=4), jobs(Job(prompt=(20,) * 10, output=21, at_s=0.0)), acceptance=1.0
    )
    assert sure.served[0].counts == [1, 5, 5, 5, 5] and sure.accepted == sure.drafted == 16
    never = simulate(world(drafts=4), jobs(Job(prompt=(20,) * 10, output=9, at_s=0.0)))
    assert never.accepted == 0 < never.drafted and never.served[0].counts == [1] * 9


# -- figures ---------------------------------------------------------------------------------------


def test_percentiles_and_gaps() -> None:
    assert percentile([], 50) is None and percentile([3.0], 95) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile(list(range(101)), 95) == 95
    told = summary([Served(0.0, 10, times=[1.0, 2.0, 5.0], counts=[1, 2, 3])])
    assert told["itl_s"]["max"] == 1.0 and told["itl_s"]["p50"] == 1.0  # type: ignore[index]
    assert told["itl_s"]["mean"] == pytest.approx((2 * 0.5 + 3 * 1.0) / 5)  # type: ignore[index]
    failed = summary([Served(0.0, 10, error="gone")])
    assert (failed["requests"], failed["failed"], failed["output_tok_s"]) == (0, 1, None)


def test_the_error_is_ours_over_theirs() -> None:
    ours = {"output_tok_s": 110.0, "ttft_s": {"p50": 0.5, "p95": None}}
    theirs = {"output_tok_s": 100.0, "ttft_s": {"p50": 1.0, "p95": 2.0}}
    found = compared(ours, theirs)
    assert set(found) == {"output_tok_s", "ttft_s.p50"}
    assert found["output_tok_s"]["error"] == pytest.approx(0.1)  # type: ignore[index]
    assert found["ttft_s.p50"]["error"] == -0.5  # type: ignore[index]
