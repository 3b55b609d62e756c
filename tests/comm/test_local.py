"""The protocol with virtual ranks: exact to the bit, for every op, size, world and cutting."""

from __future__ import annotations

import ctypes
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_of, together

from metainfer.comm import layout
from metainfer.comm.backends.calls import Rows, Side
from metainfer.comm.backends.local import LocalGroup
from metainfer.comm.backends.slabs import SlabComm, gather_bytes
from metainfer.comm.errors import CommError
from metainfer.comm.exact import canonical_add_rmsnorm, canonical_sum
from metainfer.comm.layout import Code
from metainfer.comm.pieces import Slots, cut, fits
from metainfer.comm.request import Epilogue, Op, Request, shard
from metainfer.core.errors import InternalError

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SUMMED = {**FLOATS, "float64": torch.float64, "int32": torch.int32}
AS_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(AS_INT[tensor.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def values(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of many sizes, with zeros of both signs, infinities, NaN, the largest finite
    and subnormal numbers strewn in."""
    if not dtype.is_floating_point:
        high = 127 if dtype == torch.uint8 else 2**31 - 1
        return torch.randint(0, high, (count,), generator=generator).to(dtype)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-4, 4, (count,), generator=generator)
    found = x.to(dtype)
    info = torch.finfo(dtype)
    special = [
        0.0,
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        info.max,
        info.min,
        info.tiny / 4,
    ]
    where = torch.randint(0, max(1, count), (count // 5,), generator=generator)
    which = torch.randint(0, len(special), (count // 5,), generator=generator)
    found[where] = torch.tensor(special, dtype=torch.float64).to(dtype)[which]
    return found


def inputs(request: Request, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = {**SUMMED, "int64": torch.int64, "uint8": torch.uint8}[request.dtype]
    found = []
    for rank in range(request.world):
        count = request.count
        if request.op is Op.ALL_GATHER:
            begin, end = shard(count, request.world, rank)
            count = end - begin
        found.append(values(count, dtype, generator))
    return found


def expected(request: Request, given: list[torch.Tensor], rank: int) -> torch.Tensor:
    n = request.world
    if request.op is Op.ALL_REDUCE:
        return canonical_sum(given)
    if request.op is Op.REDUCE_SCATTER:
        begin, end = shard(request.count, n, rank)
        return canonical_sum([x[begin:end] for x in given])
    if request.op is Op.ALL_GATHER:
        return torch.cat(given)
    if request.op is Op.ALL_TO_ALL:
        block = request.count // n
        return torch.cat([x[rank * block : (rank + 1) * block] for x in given])
    return given[request.root]


def check(group: LocalGroup, request: Request, algorithm: str, seed: int, times: int = 1) -> None:
    plan = plan_of(request, algorithm)
    for turn in range(times):
        given = inputs(request, seed + turn)
        kept = [x.clone() for x in given]
        results = together(group, lambda comm: comm.run(plan, given[comm.rank]))  # noqa: B023
        for rank, result in enumerate(results):
            assert isinstance(result, torch.Tensor), result
            assert same(result, expected(request, given, rank)), (request, algorithm, rank)
            assert same(given[rank], kept[rank])


ALGORITHMS = [(Op.ALL_REDUCE, "one_shot"), (Op.ALL_REDUCE, "two_shot")] + [
    (op, "direct") for op in Op if op not in (Op.ALL_REDUCE, Op.BARRIER)
]


def test_two_of_bfloat16_need_one_rounding() -> None:
    """Sums of two by one instruction: rounding to float32 before changes nothing (24 >= 2 * 8 + 2).
    Every pair of significands, exponents up to 27 apart, either sign; float64 holds such sums."""
    significands = torch.arange(128, 256, dtype=torch.float64)
    a, b = significands.view(-1, 1, 1, 1), significands.view(1, -1, 1, 1)
    scale = torch.tensor(2.0, dtype=torch.float64) ** -torch.arange(28).view(1, 1, -1, 1)
    exact = a + b * scale * torch.tensor([1.0, -1.0], dtype=torch.float64)
    step = torch.exp2(torch.frexp(exact).exponent.double() - 8)
    once = (exact / step).round() * step  # halves to even
    assert torch.equal(once.float(), exact.float().bfloat16().float())


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "pushed"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_op_is_exact_to_the_bit(world: int, shared: bool, seed: int, poison: None) -> None:
    # 256-byte slots cut almost everything into several calls.
    with LocalGroup(world, slot_bytes=256, shared=shared) as group:
        for op, algorithm in ALGORITHMS:
            for count in (0, 1, world - 1, 7 * world, 1000 + 5):
                if op is Op.ALL_TO_ALL:
                    count = count // world * world
                for dtype in ("bfloat16", "float32"):
                    request = Request(op=op, count=count, dtype=dtype, world=world, root=world - 1)
                    check(group, request, algorithm, seed + count)


@pytest.mark.parametrize("dtype", SUMMED)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_every_type_is_summed_wide_and_rounded_once(dtype: str, algorithm: str, seed: int) -> None:
    with LocalGroup(4, slot_bytes=8192) as group:
        request = Request(op=Op.ALL_REDUCE, count=5001, dtype=dtype, world=4)
        check(group, request, algorithm, seed, times=3)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float64"])
def test_every_type_is_moved(dtype: str, seed: int) -> None:
    with LocalGroup(3, slot_bytes=512) as group:
        for op in (Op.ALL_GATHER, Op.BROADCAST, Op.ALL_TO_ALL):
            check(group, Request(op=op, count=999, dtype=dtype, world=3), "direct", seed)


def test_the_order_of_the_sum_is_that_of_the_ranks() -> None:
    # 1 is lost beside 2^24 in float32, but 1 + 1 is not: only rank order gives this.
    given = [torch.tensor([x]) for x in (1.0, 1.0, 2.0**24, -(2.0**24))]
    assert canonical_sum(given).item() == 2.0
    assert (
        canonical_sum(given[::-1]).item() == 2.0
        and canonical_sum([given[i] for i in (2, 0, 1, 3)]).item() == 0.0
    )
    with LocalGroup(4) as group:
        for order, result in (((2, 0, 1, 3), 0.0), ((0, 1, 2, 3), 2.0)):
            for algorithm in ("one_shot", "two_shot"):
                request = Request(op=Op.ALL_REDUCE, count=1, dtype="float32", world=4)
                plan = plan_of(request, algorithm)
                found = together(group, lambda c: c.run(plan, given[order[c.rank]]).item())  # noqa: B023
                assert found == [result] * 4


@pytest.mark.parametrize("dtype", SUMMED)
def test_two_parts_are_summed_as_any_number_is(dtype: str) -> None:
    """A third part that adds nothing, not even to a sign, takes the long way."""
    kind = SUMMED[dtype]
    nothing = torch.tensor(-0.0).to(kind)
    drawn = torch.Generator().manual_seed(3)
    width = kind.itemsize
    given = [
        torch.randint(-(1 << 7), 1 << 7, (200_000 * width,), generator=drawn, dtype=torch.int8)
        .view(kind)
        for _ in range(2)
    ]  # fmt: skip
    strewn = [values(4096, kind, drawn) for _ in range(2)]
    for parts in (given, strewn):
        assert same(canonical_sum(parts), canonical_sum([*parts, nothing.expand_as(parts[0])]))


def test_one_rounding_not_one_per_rank() -> None:
    # Each 2^-9 alone is half a unit of 1.0 in bfloat16 and would round away, three do not.
    given = [torch.tensor([x], dtype=torch.bfloat16) for x in (1.0, 2**-9, 2**-9, 2**-9)]
    assert canonical_sum(given).item() == 1.0 + 2**-7
    with LocalGroup(4) as group:
        request = Request(op=Op.ALL_REDUCE, count=1, dtype="bfloat16", world=4)
        plan = plan_of(request, "two_shot")
        assert together(group, lambda c: c.run(plan, given[c.rank]).item()) == [1.0078125] * 4


@settings(max_examples=60)
@given(st.data())
def test_any_sequence_of_collectives(data: st.DataObject) -> None:
    """Ops, sizes and algorithms in any order on one group: halves and flags are reused rightly."""
    world = data.draw(st.sampled_from([2, 3, 4]))
    slot = data.draw(st.sampled_from([128, 192, 1024]))
    shared = data.draw(st.booleans())
    first = data.draw(st.sampled_from([0, (1 << 40) - 3, (1 << 40) - 1]))
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(ALGORITHMS),
                st.integers(0, 300),
                st.sampled_from(["bfloat16", "float64"]),
            ),
            min_size=1, max_size=6,
        )
    )  # fmt: skip
    with LocalGroup(world, slot_bytes=slot, shared=shared, first_call=first) as group:
        for index, ((op, algorithm), count, dtype) in enumerate(steps):
            if op is Op.ALL_TO_ALL:
                count = count // world * world
            request = Request(op=op, count=count, dtype=dtype, world=world, root=index % world)
            check(group, request, algorithm, seed=index)


@pytest.mark.parametrize("first", [(1 << 40) - 5, (1 << 40) - 1, (1 << 41) - 2, 0])
def test_the_counter_wraps(first: int, seed: int) -> None:
    with LocalGroup(3, slot_bytes=1024, first_call=first) as group:
        request = Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=3)
        check(group, request, "two_shot", seed, times=10)
        assert group.ranks[0].calls == first + 10


def test_in_place(seed: int) -> None:
    for algorithm in ("one_shot", "two_shot"):
        request = Request(op=Op.ALL_REDUCE, count=777, dtype="bfloat16", world=4)
        plan, given = plan_of(request, algorithm), inputs(request, seed)
        want = canonical_sum(given)
        with LocalGroup(4, slot_bytes=256) as group:
            together(group, lambda c: c.run(plan, given[c.rank], given[c.rank]))  # noqa: B023
        assert all(same(x, want) for x in given)


def test_a_barrier_holds_everyone_until_the_last() -> None:
    plan = plan_of(Request(op=Op.BARRIER, count=0, dtype="uint8", world=4))
    arrived: list[float] = [0.0] * 4
    left: list[float] = [0.0] * 4

    def step(comm: SlabComm) -> None:
        time.sleep(0.05 * comm.rank)
        arrived[comm.rank] = time.monotonic()
        comm.run(plan, torch.empty(0, dtype=torch.uint8))
        left[comm.rank] = time.monotonic()

    with LocalGroup(4) as group:
        together(group, step)
    assert min(left) >= max(arrived)


def test_counts_ride_along_with_either_algorithm_and_any_cutting(seed: int) -> None:
    for algorithm, shared in (("one_shot", True), ("two_shot", False), ("two_shot", True)):
        request = Request(op=Op.ALL_REDUCE, count=500, dtype="bfloat16", world=4, side_int32=64)
        plan, given = plan_of(request, algorithm), inputs(request, seed)
        counts = [torch.randint(0, 2**31 - 1, (64,), dtype=torch.int32) for _ in range(4)]
        want = canonical_sum(counts)
        with LocalGroup(4, slot_bytes=256, shared=shared) as group:

            def step(comm: SlabComm) -> torch.Tensor:
                side = Side(counts[comm.rank], torch.full((64,), -1, dtype=torch.int32))  # noqa: B023
                result = comm.run(plan, given[comm.rank], side=side)  # noqa: B023
                assert same(result, canonical_sum(given))  # noqa: B023
                return side.summed

            for summed in together(group, step):
                assert isinstance(summed, torch.Tensor) and torch.equal(summed, want)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 2056), (8, 4096), (3, 17), (0, 8)])
def test_the_epilogue_equals_the_unfused_steps_to_the_bit(
    rows: int, hidden: int, dtype: str, algorithm: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind = SUMMED[dtype]
    request = Request(
        op=Op.ALL_REDUCE, count=rows * hidden, dtype=dtype, world=3,
        epilogue=Epilogue(hidden=hidden, eps=1e-5),
    )  # fmt: skip
    given = [torch.randn(rows, hidden, generator=generator).to(kind) for _ in range(3)]
    residual = torch.randn(rows, hidden, generator=generator).to(kind)
    weight = torch.randn(hidden, generator=generator).to(kind)
    want, total = canonical_add_rmsnorm(canonical_sum(given), residual, weight, 1e-5)

    def step(comm: SlabComm) -> None:
        made = Rows(residual.clone(), weight, torch.full_like(residual, float("nan")))
        comm.run(plan_of(request, algorithm), given[comm.rank], rows=made)
        assert same(made.residual, total) and same(made.normed, want)

    with LocalGroup(3, slot_bytes=256 * 1024) as group:
        assert together(group, step) == [None] * 3


def test_the_epilogue_is_the_norm_of_the_house_within_rounding(seed: int) -> None:
    from metainfer.ops.norm.ref import add_rmsnorm

    generator = torch.Generator().manual_seed(seed)
    y, residual = (torch.randn(4, 2000, generator=generator, dtype=torch.float64) for _ in "ab")
    weight = torch.randn(2000, generator=generator, dtype=torch.float64)
    ours, total = canonical_add_rmsnorm(y, residual, weight, 1e-6)
    theirs, sums = add_rmsnorm(y, residual, weight, float(torch.tensor(1e-6)))
    assert torch.equal(total, sums)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_a_row_that_does_not_fit_is_refused_with_both_numbers() -> None:
    request = Request(
        op=Op.ALL_REDUCE, count=4096, dtype="bfloat16", world=4, epilogue=Epilogue(hidden=4096)
    )
    verdict = fits(request, Slots(bytes=8000, shared=True), "one_shot")
    assert verdict.reasons[0].message == "a row of 8192 B exceeds the 8000 B of a part"
    assert fits(request, Slots(bytes=8192, shared=True), "one_shot").accepted
    assert not fits(request, Slots(bytes=8192, shared=True), "two_shot").accepted
    assert fits(request, Slots(bytes=8192, shared=True), "ring").reasons[0].code == "algorithm"


@given(st.data())
def test_pieces_cover_input_and_output_once_and_fit_their_slots(data: st.DataObject) -> None:
    op, algorithm = data.draw(st.sampled_from(ALGORITHMS))
    world = data.draw(st.integers(1, 8))
    count = data.draw(st.integers(0, 700))
    if op is Op.ALL_TO_ALL:
        count = count // world * world
    slots = Slots(bytes=data.draw(st.integers(256, 600)), shared=data.draw(st.booleans()))
    request = Request(op=op, count=count, dtype="bfloat16", world=world)
    ranks = [list(cut(request, algorithm, rank, slots)) for rank in range(world)]
    assert len({len(pieces) for pieces in ranks}) == 1
    for pieces in zip(*ranks, strict=True):
        assert len({(p.kind, p.same, p.stride, p.second, p.unit, p.out_shift) for p in pieces}) == 1
        for r, piece in enumerate(pieces):
            for p in range(world):
                size = piece.in_len[p] * 2
                place = p * piece.stride if slots.shared and not piece.same else 0
                limit = piece.second if piece.second else slots.bytes
                assert place + size <= limit and (piece.same or size <= piece.stride)
                assert piece.second + piece.out_len[p] * 2 <= slots.bytes
                if op in (Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BROADCAST) and p != r:
                    assert pieces[p].in_len[r] == piece.out_len[p]
                if op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):
                    assert pieces[p].in_len[r] == piece.in_len[r]
    if op is Op.ALL_REDUCE:
        seen = sorted(
            i for piece in ranks[0]
            for p in (range(world) if algorithm == "two_shot" else [0])
            for i in range(piece.in_begin[p], piece.in_begin[p] + piece.in_len[p])
        )  # fmt: skip
        assert seen == list(range(count))


NEVER_S = 3600.0  # longer than `together` waits: whoever comes back was not out of time


def run_error(results: list[object], rank: int) -> CommError:
    found = results[rank]
    assert isinstance(found, CommError), found
    return found


def test_a_peer_under_another_plan_is_an_error_and_not_a_hang(seed: int) -> None:
    one = plan_of(Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=3), "one_shot")
    two = plan_of(Request(op=Op.ALL_REDUCE, count=64, dtype="float16", world=3), "one_shot")
    plans = [one, one, two]
    given = [torch.zeros(64, dtype=torch.bfloat16)] * 2 + [torch.zeros(64, dtype=torch.float16)]
    with LocalGroup(3, budget_s=NEVER_S) as group:
        results = together(group, lambda c: c.run(plans[c.rank], given[c.rank]))
        texts = [str(run_error(results, rank)) for rank in range(3)]
        assert any("runs plan" in text for text in texts)
        assert any(f"rank 2 runs plan {two.plan_id:06x}" in t for t in texts) or any(
            f"rank {p} runs plan {one.plan_id:06x}" in texts[2] for p in (0, 1)
        )


def test_a_missing_call_is_reported_by_all_with_op_size_and_peer() -> None:
    plan = plan_of(Request(op=Op.ALL_REDUCE, count=4096, dtype="bfloat16", world=3), "two_shot")
    given = torch.zeros(4096, dtype=torch.bfloat16)

    with LocalGroup(3, budget_s=NEVER_S) as group:
        group.ranks[0].budget_s = 0.3  # rank 2 may come later than that, and is told why
        results = together(group, lambda c: None if c.rank == 1 else c.run(plan, given))
        for rank in (0, 2):
            error = run_error(results, rank)
            assert "all_reduce of 8192 B (bfloat16) over 3 ranks failed" in str(error)
            assert error.peer == 1 and "rank 1" in str(error)
        assert [run_error(results, rank).secondary for rank in (0, 2)] == [False, True]
        # Broken for good, at once and on the late rank too.
        for comm in group.ranks:
            comm.budget_s = NEVER_S
        again = together(group, lambda c: c.run(plan, given))
        assert all(isinstance(result, CommError) for result in again)
        assert str(again[0]) == str(results[0])


def test_the_first_to_give_up_tells_the_others() -> None:
    plan = plan_of(Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=3), "one_shot")
    given = torch.zeros(64, dtype=torch.bfloat16)
    with LocalGroup(3, budget_s=NEVER_S) as group:
        group.ranks[0].budget_s = 0.2
        results = together(group, lambda c: None if c.rank == 1 else c.run(plan, given))
        assert not run_error(results, 0).secondary
        error = run_error(results, 2)
        assert error.secondary and "rank 0 waited in vain for rank 1" in str(error)


def test_a_rank_that_gives_up_releases_the_others_with_its_cause() -> None:
    plan = plan_of(Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=4), "one_shot")
    given = torch.zeros(64, dtype=torch.bfloat16)

    def step(comm: SlabComm) -> object:
        if comm.rank == 2:
            time.sleep(0.05)
            return comm.abort("ValueError: the 3rd layer is missing")
        return comm.run(plan, given)

    with LocalGroup(4, budget_s=NEVER_S) as group:
        results = together(group, step)
        for rank in (0, 1, 3):
            error = run_error(results, rank)
            assert error.secondary and error.peer == 2
            assert "rank 2 gave up: ValueError: the 3rd layer is missing" in str(error)


def test_wrong_tensors_are_our_bug_and_break_nothing() -> None:
    request = Request(op=Op.ALL_GATHER, count=9, dtype="bfloat16", world=2)
    plan, empty = plan_of(request), torch.empty(0, dtype=torch.uint8)
    with LocalGroup(2) as group:
        comm = group.ranks[0]
        for given, word in (
            (torch.zeros(4, dtype=torch.bfloat16), "5, contiguous"),
            (torch.zeros(5), "torch.float32"),
            (torch.zeros(10, dtype=torch.bfloat16)[::2], "not contiguous"),
        ):
            with pytest.raises(InternalError, match=word):
                comm.run(plan, given)
        with pytest.raises(InternalError, match="0 counts"):
            comm.run(plan, torch.zeros(5, dtype=torch.bfloat16), side=Side(given, given))
        with pytest.raises(InternalError, match="group of 2"):
            comm.run(plan_of(Request(op=Op.BARRIER, count=0, dtype="uint8", world=3)), empty)
        check(group, request, "direct", 1)
    rows = Request(
        op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=2, epilogue=Epilogue(hidden=64)
    )
    words = "a row of 128 B exceeds the 96 B of a part"
    with LocalGroup(2, slot_bytes=100) as group, pytest.raises(InternalError, match=words):
        group.ranks[0].run(plan_of(rows, "one_shot"), torch.zeros(64, dtype=torch.bfloat16))


def test_bytes_of_any_length_reach_everyone() -> None:
    texts = [b"", b"abc", b"x" * 5000]
    with LocalGroup(3, slot_bytes=1024) as group:
        assert together(group, lambda c: gather_bytes(c, plan_of, texts[c.rank])) == [texts] * 3
        assert together(group, lambda c: gather_bytes(c, plan_of, b"")) == [[b""] * 3] * 3


def test_abort_words_and_sizes() -> None:
    for code in Code:
        word = layout.abort_word(code, 7, 3)
        assert word and layout.read_abort(word) == (code, 7, 3)
    assert layout.slab_bytes(4, 1000, shared=False) % 4096 == 0
    assert (
        layout.slab_bytes(4, 100_000, shared=False)
        > 3 * layout.slab_bytes(4, 100_000, shared=True) // 2
    )
    assert ctypes.sizeof(layout.Call) % 8 == 0


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("mib", [1, 5])
def test_large_messages(mib: int, algorithm: str, seed: int) -> None:
    request = Request(op=Op.ALL_REDUCE, count=(mib << 20) // 2 + 1, dtype="bfloat16", world=2)
    with LocalGroup(2) as group:
        check(group, request, algorithm, seed)


def test_random_delays(seed: int) -> None:
    request = Request(op=Op.ALL_REDUCE, count=33, dtype="bfloat16", world=4)
    plans = [plan_of(request, name) for name in ("one_shot", "two_shot")]
    given = inputs(request, seed)
    want = canonical_sum(given)

    def step(comm: SlabComm) -> int:
        order, waits = random.Random(seed), random.Random(seed + comm.rank)
        wrong = 0
        for _ in range(300):
            plan = order.choice(plans)
            if waits.random() < 0.1:
                time.sleep(waits.random() * 1e-3)
            wrong += not same(comm.run(plan, given[comm.rank]), want)
        return wrong

    with LocalGroup(4, slot_bytes=128) as group:
        assert together(group, step) == [0] * 4
