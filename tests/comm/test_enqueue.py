"""Steps written down once: C and the interpreter make the same driver calls, and stop at the same
one."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from metainfer.comm import driver, enqueue
from metainfer.comm.backends import copy_order
from metainfer.comm.backends.copy_order import Means, Order, Staging
from metainfer.comm.enqueue import Behind, Kind, Program, Steps
from metainfer.comm.layout import Call
from metainfer.comm.request import Op, Request
from metainfer.core.verdict import reject
from metainfer.kernels import native

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

Asked = tuple[Any, ...]
ADD, POST, WAIT = 1000, 2000, 3000
"""Handles of kernels."""


class Noting:
    """The driver's functions; they note what they were asked for, a kernel's arguments too, and
    fail where they are told to."""

    def __init__(self, fails_at: int = -1, status: int = 0) -> None:
        self.asked: list[Asked] = []

        def noting(name: str) -> Callable[..., int]:
            def note(*given: int) -> int:
                more = arguments_of(given) if name == "cuLaunchKernel" else ()
                self.asked.append((name, *given, *more))
                return status if len(self.asked) == fails_at + 1 else 0

            return note

        self.functions = [
            ctypes.CFUNCTYPE(ctypes.c_int, *types)(noting(name))
            for name, types in driver.IN_STREAMS
        ]


def arguments_of(given: Sequence[int]) -> tuple[bytes, ...]:
    """What a kernel would get: a call, or words."""
    function, addresses = given[0], ctypes.cast(given[9], ctypes.POINTER(ctypes.c_void_p))
    if function >= WAIT:
        sizes = [8] * 6
    elif function >= POST:
        sizes = [8] * 2
    else:
        sizes = [ctypes.sizeof(Call)]
    return tuple(ctypes.string_at(addresses[at] or 0, size) for at, size in enumerate(sizes))


def loops(noting: Noting) -> list[Callable[[Program, Any], tuple[int, int]]]:
    library = native.load(enqueue.SOURCE)
    return [enqueue.in_c(noting.functions, library), enqueue.in_python(noting.functions)]


def means_of(rank: int, world: int, by_streams: bool) -> Means:
    return Means(
        rank=rank,
        staging=Staging(1 << 40, 1 << 41, world, 1 << 20),
        **{name: 16 + at for at, name in enumerate(("down", "up", "sums", "posts", "waits"))},
        record=1 << 42,
        scratch=1 << 43,
        post=POST,
        wait=WAIT,
        add=lambda kind: ADD + kind,
        event=lambda index: 500 + index,
        by_streams=by_streams,
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    world = draw(st.integers(2, 4))
    op = draw(st.sampled_from([Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER]))
    kind = draw(st.sampled_from(["bfloat16", "float32"]))
    request = Request(op=op, count=draw(st.integers(0, 3000)), dtype=kind, world=world)
    means = means_of(draw(st.integers(0, world - 1)), world, draw(st.booleans()))
    piece = draw(st.sampled_from([0, 512, 2048]))
    return Order(means, request, in_place=draw(st.booleans()), piece_bytes=piece).program()


@hypothesis.given(programs(), st.randoms(use_true_random=False))
@hypothesis.settings(max_examples=40, deadline=None)
def test_c_and_the_interpreter_make_the_same_calls(program: Program, random: Any) -> None:
    """Of any call of any rank, wherever operands lie and however far counters are."""
    values = [random.getrandbits(64) - (1 << 63) for _ in range(copy_order.BASES)]
    values[enqueue.NOTHING] = 0
    bases = (ctypes.c_int64 * copy_order.BASES)(*values)
    made = []
    for way in range(2):
        noting = Noting()
        assert loops(noting)[way](program, bases) == (len(program.steps), 0)
        made.append(noting.asked)
    driven = [step for step in program.steps if step.kind != Kind.PUT]
    assert made[0] == made[1] and len(made[0]) == len(driven)
    names = [driver.IN_STREAMS[step.kind][0] for step in driven]
    assert [name for name, *_ in made[0]] == names


def test_a_step_gives_the_driver_what_its_signature_says() -> None:
    """Every kind once, by hand: names and order of arguments as the driver's manual has them."""
    stream, event, words = Behind(1, 5), 77, (ctypes.c_uint64 * 1)(0)
    at = ctypes.addressof(words)
    steps = Steps()
    steps.record(event, stream)
    steps.follow(9, event)
    steps.copy(Kind.DOWN, 0x100, Behind(2, 16), 48, 3)
    steps.copy(Kind.UP, Behind(2, -16), 0x200, 32, 4)
    steps.copy(Kind.ACROSS, 0x300, 0x400, 8, 4)
    steps.write(0x500, steps.count(3), 6)
    steps.wait(0x600, steps.count(3), 7)
    steps.launch_words(POST, 8, [Behind(2, 1), (1 << 64) - 1], grid=3, block=64)
    steps.launch(ADD, 32, 512, 8, [Call()], {at: Behind(1, 1)})
    program, bases = steps.written(), (ctypes.c_int64 * 4)(0, 1000, 2000, 40)
    assert program.counted == {3: 2}
    bases[3] += program.counted[3]
    for way in range(2):
        words[0], noting = 0, Noting()
        assert loops(noting)[way](program, bases) == (12, 0)
        launched = noting.asked[7]
        assert noting.asked[:7] == [
            ("cuEventRecord", 77, 1005),
            ("cuStreamWaitEvent", 9, 77, 0),
            ("cuMemcpyDtoHAsync_v2", 0x100, 2016, 48, 3),
            ("cuMemcpyHtoDAsync_v2", 1984, 0x200, 32, 4),
            ("cuMemcpyDtoDAsync_v2", 0x300, 0x400, 8, 4),
            ("cuStreamWriteValue64_v2", 6, 0x500, 41, 0),
            ("cuStreamWaitValue64_v2", 7, 0x600, 42, 0),
        ]
        assert launched[:10] == ("cuLaunchKernel", POST, 3, 1, 1, 64, 1, 1, 0, 8)
        assert launched[11:] == (0, (2001).to_bytes(8, "little"), b"\xff" * 8)
        assert noting.asked[8][:10] == ("cuLaunchKernel", ADD, 32, 1, 1, 512, 1, 1, 0, 8)
        assert words[0] == 1001


@pytest.mark.parametrize("way", [0, 1], ids=["C", "interpreter"])
@pytest.mark.parametrize("by_streams", [True, False])
def test_a_call_that_fails_is_the_last_one(way: int, by_streams: bool) -> None:
    """At every position."""
    request = Request(op=Op.ALL_REDUCE, count=1500, dtype="bfloat16", world=2)
    program = Order(means_of(0, 2, by_streams), request, in_place=True, piece_bytes=1024).program()
    bases = (ctypes.c_int64 * copy_order.BASES)()
    driven = [at for at, step in enumerate(program.steps) if step.kind != Kind.PUT]
    for position, at in enumerate(driven):
        noting = Noting(position, 7)
        assert loops(noting)[way](program, bases) == (at, 7)
        assert len(noting.asked) == position + 1


class Said:
    """The driver's words for a status."""

    def cuGetErrorString(self, status: int, text: Any) -> None:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = f"status of {status}".encode()


@pytest.mark.parametrize("compiler", [True, False])
def test_an_error_names_the_driver_s_function_and_the_step(
    monkeypatch: pytest.MonkeyPatch, compiler: bool
) -> None:
    """Without a compiler the interpreter makes the calls, and why is said."""
    if not compiler:
        none = reject("compiler", "no working C compiler: cc: not found")
        monkeypatch.setattr(native, "try_load", lambda source: (None, none))
    monkeypatch.setattr(driver, "library", Said)
    steps = Steps()
    for event in (1, 2, 3):
        steps.record(event, 0)
    steps.follow(0, 3)
    program, bases = steps.written(), (ctypes.c_int64 * 1)()
    noting = Noting(3, 700)
    loop = enqueue.Loop(noting.functions)
    assert [reason.message for reason in loop.refused.reasons] == (
        [] if compiler else ["no working C compiler: cc: not found"]
    )
    with pytest.raises(driver.CudaError) as caught:
        loop(program, bases)
    assert "cuStreamWaitEvent, step 4 of 4, failed: status of 700 (700)" in str(caught.value)
    enqueue.Loop(Noting().functions)(program, bases)
