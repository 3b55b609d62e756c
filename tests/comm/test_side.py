"""Forks: done at once where nothing runs beside, behind and before what they must be on a card."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from metainfer.comm.side import IN_ORDER, Done, Pending, Turns


class Noted:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def fork(self, work: Callable[[], Any]) -> Pending[Any]:
        self.asked.append("fork")
        return Done(work())

    def run(self, work: Callable[[], Any]) -> Any:
        self.asked.append("run")
        return work()


def test_a_fork_in_order_is_done_when_it_is_asked_for() -> None:
    done: list[int] = []
    pending = IN_ORDER.fork(lambda: done.append(1) or 7)
    assert done == [1] and pending.wait() == 7 and IN_ORDER.run(lambda: 8) == 8


def test_a_side_is_taken_while_lanes_take_turns_and_at_no_other_time() -> None:
    side = Noted()
    turns = Turns(side)
    assert turns.fork(lambda: 1).wait() == 1 and turns.run(lambda: 2) == 2
    assert side.asked == []
    with turns:
        assert turns.fork(lambda: 3).wait() == 3 and turns.run(lambda: 4) == 4
        assert side.asked == ["fork", "run"]
    side.asked.clear()
    with pytest.raises(ZeroDivisionError), turns:
        turns.run(lambda: 1 // 0)
    side.asked.clear()
    turns.fork(lambda: 5)
    assert side.asked == []


class FakeStream:
    """Notes what waited for it."""

    def __init__(self, device: Any = None) -> None:
        self.device, self.waits = device, 0

    def wait_stream(self, other: Any) -> None:
        self.waits += 1

    def wait_event(self, event: Any) -> None:
        self.waits += 1


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """A card's current stream, of a card without any."""
    import torch

    class FakeEvent:
        def record(self, stream: Any) -> None:
            pass

    found = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    return found


def test_a_fork_that_an_error_left_behind_delays_one_call_and_no_more(
    current: FakeStream,
) -> None:
    import torch

    from metainfer.comm.card_side import CardSide

    side = CardSide(torch.device("cpu"))

    assert side.run(lambda: 1) == 1 and current.waits == 0
    first, second = side.fork(lambda: 2), side.fork(lambda: 3)
    assert first.wait() == 2 and current.waits == 1
    assert side.run(lambda: 4) == 4 and current.waits == 2  # `second` was open
    assert second.wait() == 3
    side.fork(lambda: 5)  # nobody waits: what stood between raised
    assert [side.run(lambda: 6), current.waits] == [6, 4]  # behind it
    assert [side.run(lambda: 7), current.waits] == [7, 4]  # and at once from then on


def test_a_fork_that_an_error_left_behind_in_turns_is_waited_for_at_once(
    current: FakeStream,
) -> None:
    """Whoever is given its memory next works on the current stream, and asks this side for
    nothing."""
    import torch

    from metainfer.comm.card_side import CardSide

    turns = Turns(CardSide(torch.device("cpu")))
    with turns:
        assert turns.fork(lambda: 1).wait() == 1 and current.waits == 1
    assert current.waits == 1  # nothing was open
    with pytest.raises(ZeroDivisionError), turns:
        turns.fork(lambda: 2)
        turns.run(lambda: 1 // 0)
    assert current.waits == 2
    assert turns.run(lambda: 3) == 3 and current.waits == 2


class Broken:
    """A side whose device is."""

    def fork(self, work: Callable[[], Any]) -> Pending[Any]:
        return Done(work())

    def run(self, work: Callable[[], Any]) -> Any:
        raise OSError("no device")


def test_the_error_that_ended_turns_is_the_first_one() -> None:
    with pytest.raises(ZeroDivisionError) as caught, Turns(Broken()):
        1 // 0
    assert caught.value.__notes__ == ["Nor could what it left open be waited for: no device"]
    with pytest.raises(OSError, match="no device"), Turns(Broken()):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_on_a_card_a_fork_stands_behind_what_was_asked_and_before_who_waits(
    captured: bool,
) -> None:
    import torch

    from metainfer.comm.card_side import CardSide

    side = CardSide(torch.device("cuda", 0))
    x, other, out = (torch.zeros(1 << 20, device="cuda") for _ in range(3))

    def step() -> None:
        torch.cuda._sleep(10_000_000)
        x.add_(1)
        pending = side.fork(lambda: (torch.cuda._sleep(10_000_000), x.mul_(2))[1])
        other.add_(1)
        second = side.run(lambda: x + 10)  # a fork is open: behind it
        out.copy_(pending.wait() + second)

    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    x.zero_()
    if captured:
        with torch.cuda.graph(graph):
            step()
    for turn in range(1, 4):
        graph.replay() if captured else step()
        torch.cuda.synchronize()
        wanted = 2 ** (turn + 1) - 2  # x of before, plus 1, doubled
        assert bool((x == wanted).all()) and bool((out == 2 * wanted + 10).all())
