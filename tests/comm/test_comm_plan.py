"""Plans are pure functions of shared inputs; refusals carry every reason; ranks agree or stop."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.comm.agree import DisagreementError, agree
from metainfer.comm.plan import CommPlan, Offer, choose, plan_digest
from metainfer.comm.plan_tiers import Tier
from metainfer.comm.request import MAX_WORLD, Epilogue, Op, Precision, Request, shard
from metainfer.core.errors import RefusedError
from metainfer.core.ledger import Origin
from metainfer.core.verdict import reject


def request(**change: object) -> Request:
    base = {"op": Op.ALL_REDUCE, "count": 4096, "dtype": "bfloat16", "world": 4}
    return Request(**{**base, **change})  # type: ignore[arg-type]


SLOW = Offer(backend="gloo", algorithm="gather", us=900.0)
FAST = Offer(backend="ipc", algorithm="one_shot", us=6.0)
NCCL = Offer(backend="nccl", algorithm="ring", us=3.0, precision=Precision.NATIVE)
NO_PEER = Offer(
    backend="ipc", algorithm="two_shot", us=1.0, verdict=reject("peer", "no peer access")
)


@given(st.integers(0, 10_000), st.integers(1, MAX_WORLD))
def test_shards_cover_everything_once_and_differ_by_one(count: int, world: int) -> None:
    parts = [shard(count, world, rank) for rank in range(world)]
    assert parts[0][0] == 0 and parts[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_every_fault_of_a_request_is_named_in_one_pass() -> None:
    bad = request(op=Op.ALL_TO_ALL, count=7, dtype="bf16", world=9, root=9)
    text = " ".join(reason.message for reason in bad.check().reasons)
    for part in ("'bf16'", "9 ranks", "root 9", "7 elements"):
        assert part in text
    assert request().check().accepted


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int64"},
        {"count": -1},
        {"op": Op.BARRIER, "count": 1},
        {"root": 4},
        {"op": Op.ALL_TO_ALL, "count": 4097},
        {"side_int32": 65},
        {"op": Op.BROADCAST, "side_int32": 1},
        {"epilogue": Epilogue(hidden=4095)},
        {"op": Op.ALL_GATHER, "epilogue": Epilogue(hidden=4096)},
        {"world": 0},
    ],
)
def test_each_rule_of_a_request(change: dict[str, object]) -> None:
    assert not request(**change).check().accepted
    with pytest.raises(RefusedError, match="cannot be planned"):
        choose(request(**change), [FAST])


def test_what_may_be_moved_need_not_be_summable() -> None:
    assert request(op=Op.ALL_GATHER, dtype="int64").check().accepted


def test_auto_takes_the_best_estimate_and_says_why_the_others_lost() -> None:
    plan = choose(request(), [SLOW, NO_PEER, NCCL, FAST])
    assert (plan.backend, plan.algorithm) == ("ipc", "one_shot")
    losers = {loser.value: loser.reasons[0].code for loser in plan.decision.losers}
    assert losers == {"gloo:gather": "slower", "ipc:two_shot": "peer", "nccl:ring": "precision"}
    assert plan.decision.origin is Origin.COST_MODEL


def test_native_precision_is_taken_only_where_it_is_allowed() -> None:
    loose = request(precision=Precision.NATIVE)
    assert choose(loose, [FAST, NCCL]).backend == "nccl"
    assert choose(loose, [FAST, NCCL], deterministic=True).backend == "ipc"


def test_a_tier_beats_an_estimate_unless_its_method_cannot_run() -> None:
    def tier(method: str) -> Tier:
        return Tier(bytes_from=0, bytes_to=1 << 20, method=method, origin=Origin.RECORD, why="w")

    plan = choose(request(), [FAST, SLOW], [tier("gloo:gather")])
    assert plan.backend == "gloo" and plan.decision.origin is Origin.RECORD
    plan = choose(request(), [FAST, NO_PEER], [tier("ipc:two_shot")])
    assert plan.backend == "ipc" and "does not apply" in plan.decision.why


def test_a_forced_backend_that_cannot_run_gives_every_reason() -> None:
    captured = request(captured=True)
    dead = Offer(
        backend="nccl",
        algorithm="ring",
        verdict=reject("library", "no NCCL") & reject("world", "one rank"),
        precision=Precision.NATIVE,
        graph_safe=False,
    )
    with pytest.raises(RefusedError) as caught:
        choose(captured, [FAST, dead], forced="nccl")
    text = str(caught.value)
    for part in ("no NCCL", "one rank", "rounds more than once", "inside a graph"):
        assert part in text
    with pytest.raises(RefusedError, match="not among the backends: ipc, nccl"):
        choose(request(), [FAST, dead], forced="ncll")
    assert choose(request(), [FAST, SLOW], forced="gloo").decision.origin is Origin.FLAG
    assert choose(request(), [FAST, NO_PEER], forced="ipc:one_shot").algorithm == "one_shot"


def test_b12_when_nobody_can_run_it_every_gate_of_every_path_is_listed() -> None:
    gates = [
        Offer(backend="ipc", algorithm="one_shot", verdict=reject("nvlink", "no NVLink")),
        Offer(backend="host", algorithm="one_shot", verdict=reject("pinned", "no pinned memory")),
    ]
    with pytest.raises(RefusedError) as caught:
        choose(request(), gates)
    assert [reason.code for reason in caught.value.reasons] == ["nvlink", "pinned"]


def test_the_digest_names_what_runs_and_not_why() -> None:
    plan = choose(request(), [FAST, SLOW])
    other_why = choose(request(), [FAST], forced="ipc")
    assert plan.digest == other_why.digest and plan.plan_id == other_why.plan_id < 1 << 24
    assert plan.digest != choose(request(count=4097), [FAST]).digest
    assert plan.digest != choose(request(), [SLOW]).digest
    assert json.loads(json.dumps(plan.to_json()))["backend"] == "ipc"


def exchange_of(world: int) -> list[object]:
    """An in-process all-gather of bytes between threads, for one `agree` per rank."""
    board: list[list[bytes]] = []
    slots: list[bytes] = [b""] * world
    meet = threading.Barrier(world, action=lambda: board.append(list(slots)))

    def of(rank: int) -> object:
        def exchange(mine: bytes) -> Sequence[bytes]:
            slots[rank] = mine
            meet.wait(120)
            seen = board[-1]
            meet.wait(120)
            return seen

        return exchange

    return [of(rank) for rank in range(world)]


def agree_all(values: list[dict[str, object]]) -> list[object]:
    exchanges = exchange_of(len(values))
    results: list[object] = [None] * len(values)

    def run(rank: int) -> None:
        try:
            results[rank] = agree("plans", values[rank], exchanges[rank])  # type: ignore[arg-type]
        except DisagreementError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_b17_ranks_that_planned_alike_hold_one_digest() -> None:
    plan = dict(plan_digest([choose(request(), [FAST, SLOW])]))
    results = agree_all([plan] * 4)
    assert len(set(results)) == 1 and len(str(results[0])) == 32


def test_b17_a_rank_that_decided_differently_stops_all_with_the_same_words() -> None:
    def planned(*offers: Offer) -> CommPlan:
        return choose(request(), offers)

    plans: list[dict[str, object]] = [dict(plan_digest([planned(FAST, SLOW)])) for _ in range(3)]
    plans.insert(2, dict(plan_digest([planned(SLOW)])))
    results = agree_all(plans)
    assert len(set(results)) == 1
    assert "on ranks 0, 1, 3" in str(results[0]) and "on rank 2" in str(results[0])
    assert '"backend":"gloo"' in str(results[0])


@given(st.permutations(list(range(4))), st.integers(0, 1 << 22))
def test_equal_inputs_give_equal_plans(order: list[int], count: int) -> None:
    offers = [FAST, SLOW, NCCL, NO_PEER]
    one = choose(request(count=count), offers)
    assert one == choose(request(count=count), offers)
    # No estimate ties here, so the order in which backends are listed cannot matter either.
    assert one.digest == choose(request(count=count), [offers[i] for i in order]).digest
