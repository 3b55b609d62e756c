"""Named rules of the scheduler, one small world each."""

from __future__ import annotations

import random

import pytest
from null_world import VOCAB, World, config_of, groups_of, request, sizes_of, world_of
from null_world import window as window_of

from metainfer.core.errors import InternalError, UsageError
from metainfer.core.request import FinishReason
from metainfer.core.step import PENDING, Phase, RunResult, StepPlan, StepResult
from metainfer.executor.null import NullDevice
from metainfer.kv.book.spec import form_groups


def phases(plan: StepPlan) -> list[Phase]:
    return [segment.phase for segment in plan.segments]


# -- admission and limits --------------------------------------------------------------------------


def test_context_length_is_refused_with_numbers() -> None:
    one = world_of()
    error = one.add(request("a", [1] * 100, 1))
    assert error is not None and error.code == "context_length_exceeded"
    assert "100 tokens" in error.cause and "99" in error.remedy
    assert one.add(request("b", [1] * 100, 0)) is None
    assert one.add(request("c", [1] * 99, 50)) is None
    one.run()
    one.check()
    assert len(one.answers["c"].tokens) == 1
    assert one.answers["c"].finish is FinishReason.LENGTH


def test_b28_what_can_never_fit_is_refused_with_numbers() -> None:
    one = world_of(pages=5)
    error = one.add(request("a", [1] * 20, 14))
    assert error is not None and error.code == "out_of_memory"
    assert "33 tokens need 5 pages of group kv, the pool has 4" in error.cause
    assert one.add(request("b", [1] * 20, 13)) is None
    one.run()
    one.check()


def test_queue_full_is_a_429_and_changes_nothing() -> None:
    one = world_of(max_waiting=2)
    assert [one.add(request(f"r{i}", [i], 2)) for i in range(2)] == [None, None]
    error = one.add(request("r2", [1], 2))
    assert error is not None and (error.status, error.code) == (429, "queue_full")
    assert error.retry_after_s
    one.step()
    assert one.add(request("r2", [1], 2)) is None
    one.run()
    one.check()


@pytest.mark.parametrize("bad", [request("", [], 1), request("r", [1], 1)])
def test_empty_prompt_and_reused_id_are_refused(bad: object) -> None:
    one = world_of()
    one.add(request("r", [1, 2], 3))
    assert one.add(bad) is not None  # type: ignore[arg-type]
    assert one.scheduler.counters.rejected == 1


def test_config_refuses_starvation() -> None:
    with pytest.raises(UsageError, match="step_tokens 3 is below max_running 4"):
        config_of(step_tokens=3).check()


def test_more_running_than_slots_is_refused() -> None:
    sizes = sizes_of(groups_of("dense", 8), pages=9, slots=3)
    with pytest.raises(UsageError, match="max_running 4 exceeds the 3 slots"):
        World(sizes, config_of(max_running=4))


# -- order -----------------------------------------------------------------------------------------


def test_priority_then_arrival() -> None:
    one = world_of(slots=1)
    for name, priority in (("late", 5), ("first", 1), ("second", 1), ("urgent", -1)):
        one.add(request(name, [len(name)], 2, priority=priority))
    one.run()
    order = sorted(one.answers, key=lambda name: one.answers[name].times[0])
    ends = [new.request_id for plan in one.plans for new in plan.new]
    assert ends == ["urgent", "first", "second", "late"]
    assert set(order) == set(ends)


def test_preemption_takes_the_last_in_order_and_recomputes_it() -> None:
    one = world_of(pages=9, step_tokens=64, mixed_prefill_tokens=64)
    one.add(request("low", [1] * 15, 30, priority=2))
    one.step()
    one.add(request("mid", [2] * 15, 30, priority=1))
    one.step()
    one.add(request("high", [3] * 15, 30, priority=0))
    one.run()
    one.check()
    entries = [new.request_id for plan in one.plans for new in plan.new]
    assert entries.count("high") == 1, "the most urgent is never preempted"
    assert one.scheduler.counters.preemptions == len(entries) - 3 > 0
    assert one.answers["high"].times[-1] <= one.answers["low"].times[-1]


def test_an_admission_undone_in_its_own_step_leaves_no_trace() -> None:
    """A chunk of the first takes every window page; the last, just admitted, yields unseen."""
    groups = form_groups((window_of(0, 16),), page_tokens=4)
    one = World(sizes_of(groups, pages=11, slots=3), config_of(step_tokens=100, max_running=3))
    one.keep_plans = True
    for name, length in (("a", 60), ("b", 3), ("c", 7)):
        one.add(request(name, [length] * length, 4))
    one.run()
    one.check()
    assert [new.request_id for new in one.plans[0].new] == ["a", "b"]
    assert one.plans[0].released == ()
    assert one.scheduler.counters.preemptions >= 1


@pytest.mark.parametrize("late", [False, True])
def test_pages_that_come_back_with_a_result_are_waited_for(late: bool) -> None:
    """A long chunk holds window pages until its result is in; nobody is preempted for that."""
    groups = form_groups((window_of(0, 16),), page_tokens=4)
    sizes = sizes_of(groups, pages=15, slots=2)
    one = World(
        sizes, config_of(step_tokens=100, max_running=2, mixed_prefill_tokens=100), late=late
    )
    one.add(request("prompt", [1] * 90, 5))
    one.add(request("other", [2] * 9, 20))
    one.run()
    one.check()
    assert one.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("shape", ["dense", "swa", "state", "v4"])
def test_the_next_turn_of_a_conversation_hits_the_answer_too(shape: str) -> None:
    one = world_of(shape)
    one.add(request("turn", [1] * 20, 30))
    one.run()
    one.add(request("next", [1] * 20 + one.answers["turn"].tokens + [3, 4], 5))
    one.run()
    one.check()
    assert one.answers["next"].cached == 48, "49 of 50 tokens were computed, the grid is 8"


def test_admission_promises_no_page_twice() -> None:
    """Two prompts that fit one after the other do not run together only to preempt each other."""
    one = world_of(pages=21, max_context=150, step_tokens=16)
    one.add(request("a", [1] * 100, 10))
    one.step()
    one.add(request("b", [2] * 100, 10))
    one.run()
    one.check()
    assert one.scheduler.counters.preemptions == 0
    assert one.answers["a"].times[-1] <= one.answers["b"].times[0]


def test_a_seeded_stream_survives_preemption() -> None:
    one = world_of(pages=9, step_tokens=64, mixed_prefill_tokens=64)
    for i in range(3):
        one.add(request(f"r{i}", [i] * 15, 30, seed=i))
    one.run()
    one.check()
    assert one.scheduler.counters.preemptions > 0
    resumed = [n for plan in one.plans for n in plan.new if n.sample_index]
    assert resumed and all(n.sample_index == len(n.prompt) - n.prompt_len for n in resumed)


def test_steps_are_the_same_in_every_run() -> None:
    def plans() -> list[StepPlan]:
        draw = random.Random(5)
        one = world_of("v4", pages=14, domains=2)
        for i in range(12):
            one.add(request(f"r{i}", [draw.randrange(VOCAB) for _ in range(20)], 9, priority=i % 3))
            one.step()
        one.run()
        return one.plans

    assert plans() == plans()


# -- shape of a step -------------------------------------------------------------------------------


def test_chunks_mix_with_decodes_under_the_bound() -> None:
    one = world_of()
    one.add(request("short", [1, 2], 20))
    one.step()
    one.add(request("long", list(range(40)), 2))
    one.run()
    assert phases(one.plans[0]) == [Phase.CHUNK]
    mixed = [plan for plan in one.plans if Phase.MIXED in phases(plan)]
    assert len(mixed) == 5, "40 tokens in chunks of 8"
    for plan in mixed:
        runs = plan.segments[0].ranks[0].runs
        assert [len(run.tokens) for run in runs] == [1, 8], "decodes first, chunk bounded"
    assert phases(one.plans[-1]) == [Phase.DECODE]


def test_split_phases_get_a_segment_and_a_layout_each() -> None:
    one = world_of(split_phases=True, layouts={Phase.CHUNK: "prefill", Phase.DECODE: "decode"})
    one.add(request("short", [1, 2], 20))
    one.step()
    one.add(request("long", list(range(40)), 2))
    one.run()
    both = [plan for plan in one.plans if len(plan.segments) == 2]
    assert both and [s.layout for s in both[0].segments] == ["decode", "prefill"]
    assert phases(both[0]) == [Phase.DECODE, Phase.CHUNK]
    one.check()


def test_prompts_below_the_border_join_decodes_or_come_as_a_mixed_step() -> None:
    """Both ends: 4 tokens are short where 5 are not, over all domains together."""
    one = world_of(split_phases=True, prefill_from=5, step_tokens=8, domains=2)
    for name, prompt in (("a", 3), ("b", 2)):  # a domain each: 5 tokens together
        one.add(request(name, list(range(prompt)), 9))
    one.step()
    one.add(request("c", [1, 2, 3, 4], 2))
    one.step()
    one.run()
    assert phases(one.plans[0]) == [Phase.CHUNK]
    assert phases(one.plans[1]) == [Phase.MIXED]
    assert [len(rank.runs) for rank in one.plans[1].segments[0].ranks] == [2, 1]
    alone = world_of(split_phases=True, prefill_from=5)
    alone.add(request("d", [1, 2, 3, 4], 1))
    alone.run()
    assert phases(alone.plans[0]) == [Phase.MIXED] and len(alone.plans) == 1
    one.check()


def test_idle_domains_compute_dummy_tokens() -> None:
    one = world_of(domains=3)
    one.add(request("only", [1, 2, 3], 4))
    one.run()
    for plan in one.plans:
        ranks = plan.segments[0].ranks
        assert [rank.padding for rank in ranks] == [0 if rank.runs else 1 for rank in ranks]
        assert sum(bool(rank.runs) for rank in ranks) == 1


def test_buckets_pad_every_rank() -> None:
    one = world_of(domains=2, buckets={Phase.DECODE: (2, 4)})
    for i in range(3):
        one.add(request(f"r{i}", [i], 3))
    one.run()
    decodes = [s for plan in one.plans for s in plan.segments if s.phase is Phase.DECODE]
    assert decodes[0].bucket == 2
    for segment in decodes:
        assert all(len(r.runs) + r.padding == segment.bucket for r in segment.ranks)


def test_requests_spread_over_domains_and_follow_their_prefix() -> None:
    one = world_of(domains=2)
    stem = list(range(40))
    for name in "ab":
        one.add(request(name, [*stem, ord(name)] if name == "a" else [9] * 41, 2))
    assert [one.scheduler._sequences[name].domain for name in "ab"] == [0, 1]
    one.run()
    one.add(request("filler", [8] * 30, 2))
    one.add(request("again", [*stem, 3], 2))
    assert one.scheduler._sequences["again"].domain == 0, "a hit of 40 outweighs 30 due tokens"
    one.run()
    assert one.answers["again"].cached == 40


# -- late results ----------------------------------------------------------------------------------


def test_late_results_use_placeholders_and_discard_after_the_end() -> None:
    one = world_of(late=True)
    item = request("r", [1, 2, 3], 12)
    one.add(item)
    want = one.reference("r")
    stopping = request("s", [1, 2, 3], 12, eos_token_ids=(want[4],))
    one.add(stopping)
    one.run()
    one.check()
    tokens = [run.tokens for plan in one.plans for run in plan.segments[0].ranks[0].runs]
    assert (PENDING,) in tokens
    assert one.answers["s"].tokens == want[: want.index(want[4])]
    assert one.answers["s"].finish is FinishReason.STOP
    assert one.answers["s"].stop_token == want[4]


def test_a_length_limit_wastes_no_step_when_results_are_late() -> None:
    one = world_of(late=True)
    one.add(request("r", [1, 2, 3], 5))
    one.run()
    assert sum(run.samples for p in one.plans for run in p.segments[0].ranks[0].runs) == 5


def test_a_third_plan_without_a_result_is_a_bug() -> None:
    one = world_of()
    one.add(request("r", [1], 9))
    assert one.scheduler.schedule() and one.scheduler.schedule()
    with pytest.raises(InternalError, match="third time"):
        one.scheduler.schedule()


def test_results_must_answer_the_plan() -> None:
    one = world_of()
    one.add(request("r", [1], 9))
    plan = one.scheduler.schedule()
    assert plan is not None
    with pytest.raises(InternalError, match="not awaited"):
        one.scheduler.commit(StepResult(plan.step + 1, ()))
    with pytest.raises(InternalError, match="1 runs planned, 0 answered"):
        one.scheduler.commit(StepResult(plan.step, ()))
    other = world_of()
    other.add(request("r", [1], 9))
    plan = other.scheduler.schedule()
    assert plan is not None
    with pytest.raises(InternalError, match="answered for slot 3"):
        other.scheduler.commit(StepResult(plan.step, (RunResult(3, (1,)),)))


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_cancel_frees_pages_at_once(late: bool) -> None:
    one = world_of("v4", late=late)
    for i in range(6):
        one.add(request(f"r{i}", [i] * 20, 30))
    for _ in range(4):
        one.step()
    held = one.kv[0].pools[0].used
    one.cancel("r0")
    assert one.kv[0].pools[0].used < held
    one.cancel("r5")
    assert one.answers["r5"].finish is FinishReason.CANCELLED, "still queued"
    assert one.scheduler.cancel("r5") is None
    one.scheduler.audit()
    one.run()
    one.check()
    assert one.scheduler.counters.cancelled == 2


def test_cancel_may_report_a_stop_string() -> None:
    one = world_of()
    one.add(request("r", [1], 30))
    one.step()
    output = one.scheduler.cancel("r", FinishReason.STOP)
    assert output is not None and output.finish is FinishReason.STOP
    assert one.scheduler.counters.cancelled == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_ends_one_request_and_poisons_nothing(late: bool) -> None:
    """The faulty step wrote nothing; neither its pages nor a state saved after it may be hit."""
    one = world_of("hybrid", late=late, step_tokens=16, mixed_prefill_tokens=16)
    prompt = list(range(40))
    one.add(request("bad", prompt, 9))
    one.device.faults[(1, "bad")] = "NaN in logits"
    one.run()
    assert one.answers["bad"].finish is FinishReason.ERROR
    assert one.answers["bad"].error == "NaN in logits"
    for name in ("good", "again"):
        one.add(request(name, prompt, 9))
        one.run()
    assert one.answers["again"].cached == 32
    one.check()


@pytest.mark.parametrize("shape", ["dense", "swa", "hybrid"])
def test_b25_a_fault_condemns_equal_content_that_nobody_holds(shape: str) -> None:
    """Pages under the same names may hold the same fault: they go back to the pool, and that they
    are not found again is no miss."""
    one = world_of(shape, step_tokens=64)
    prompt = list(range(40))
    one.add(request("first", prompt, 4))
    one.run()
    one.add(request("bad", prompt, 4, prompt_logprobs=0))  # computes every row anew
    one.device.faults[(one.scheduler.counters.steps, "bad")] = "NaN in logits"
    one.run()
    assert one.answers["bad"].finish is FinishReason.ERROR
    eligible = one.kv[0].watch.eligible
    one.add(request("again", prompt, 4))
    one.run()
    assert one.answers["again"].cached == 0 and one.kv[0].watch.eligible == eligible
    one.check()


def test_min_tokens_ignore_eos_and_stop_ids() -> None:
    one = world_of()
    one.add(request("free", [5, 6], 20))
    want = one.reference("free")
    second = want[2]
    first_at = want.index(second)
    one.add(request("eos", [5, 6], 20, eos_token_ids=(second,)))
    one.add(request("ignore", [5, 6], 20, eos_token_ids=(second,), ignore_eos=True))
    one.add(request("stop", [5, 6], 20, stop_token_ids=(second,), ignore_eos=True))
    one.add(request("least", [5, 6], 20, eos_token_ids=(second,), min_tokens=first_at + 1))
    one.run()
    one.check()
    assert one.answers["eos"].tokens == want[:first_at] == one.answers["stop"].tokens
    assert one.answers["ignore"].tokens == want
    assert len(one.answers["least"].tokens) > first_at


def test_prompt_only_and_prompt_rows() -> None:
    one = world_of("v4", step_tokens=12, mixed_prefill_tokens=12)
    prompt = list(range(30))
    one.add(request("warm", prompt, 3))
    one.run()
    one.add(request("rows", prompt, 0, prompt_logprobs=0))
    one.run()
    rows = one.answers["rows"]
    assert rows.tokens == [] and rows.finish is FinishReason.LENGTH
    assert [token for token, _ in rows.rows] == prompt[1:]
    assert rows.cached == 0, "rows that were not computed have no log-probabilities"
    fresh = World(one.sizes, one.config)
    fresh.add(request("rows", prompt, 0, prompt_logprobs=0))
    fresh.run()
    assert fresh.answers["rows"].rows == rows.rows


# -- readings --------------------------------------------------------------------------------------


def test_stats_count() -> None:
    one = world_of(slots=2)
    for i in range(4):
        one.add(request(f"r{i}", [7] * 20 + [i], 5))
    one.step()
    stats = one.scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 2)
    assert 0 < stats.kv_used < 1
    one.run()
    counters = one.scheduler.stats().counters
    assert counters.generated_tokens == 20
    assert counters.cache_query_tokens == 84
    assert counters.cached_tokens + counters.prompt_tokens == 84
    assert counters.cached_tokens == sum(answer.cached for answer in one.answers.values()) > 0
    assert counters.finished == 4


def test_null_device_refuses_impossible_plans() -> None:
    device = NullDevice()
    device.start(sizes_of(groups_of("dense", 8), pages=4, slots=1))
    one = world_of(slots=1)
    one.add(request("r", [1, 2], 3))
    plan = one.scheduler.schedule()
    assert plan is not None
    broken = StepPlan(plan.step, plan.segments, plan.new)
    with pytest.raises(InternalError, match="no page for entry 0"):
        device.submit(broken)
