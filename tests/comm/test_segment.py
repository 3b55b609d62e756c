"""Memory that ranks share: who gets it, who does not, and that nothing of it can be left."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ranks import leftovers, token

from metainfer.comm import segment
from metainfer.comm.segment import Asked, Segment, shortage, socket_name
from metainfer.core.errors import UserError

MEETING = Path(__file__).with_name("meeting.py")
STRANGER = """
import array, os, socket, sys
os.setuid(65534)
line = socket.socket(socket.AF_UNIX)
if sys.argv[1] == "ask":
    line.connect("\\0" + sys.argv[2])
    print(socket.recv_fds(line, 1, 1)[:2])
else:
    line.bind("\\0" + sys.argv[2])
    line.listen()
    print("here", flush=True)
    input()
"""
SCENES = 40


def wanted(group: dict[str, object], rank: int) -> object:
    """What `rank` of a scene finds: words of who was let in and reported, or an error's code."""
    world, dies, point = group["world"], group["dies"], group["point"]
    assert isinstance(world, int)
    if rank == dies:
        return "dead"
    if dies == 0 and point != "after":
        return "rank_missing"
    if rank == group["wrong"]:
        return "ranks_disagree"
    out = {group["wrong"], dies if point != "after" else -1}
    return [each + 1 if each not in out else 0 for each in range(world)]


def test_ranks_meet_in_any_order_whoever_dies_and_whoever_knocks(seed: int) -> None:
    command = [sys.executable, str(MEETING), str(SCENES), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    scenes = json.loads(done.stdout)
    assert len(scenes) == SCENES
    met = set()
    for scene in scenes:
        for group, found, again in zip(
            scene["groups"], scene["found"], scene["again"], strict=True
        ):
            whole = [wanted(group, rank) for rank in range(group["world"])]
            assert found == whole, group
            assert again == 0 and len(group["token"]) == 64
            assert leftovers(group["token"]) == []
            met.add((group["dies"] == 0, group["point"], group["wrong"] >= 0))
    assert len(met) > 8  # the draws come to most of the cases


def test_memory_is_complete_before_anyone_can_ask() -> None:
    name, told = token(), list[str]()

    def fill(address: int) -> None:
        with pytest.raises(UserError) as caught:
            Asked(name, 0.0)
        told.append(caught.value.code)

    made = Segment.create(name, 8192, fill)
    asked = Asked(name, 0.0)
    made.hand_out()
    asked.take(8192).close()
    made.close()
    assert told == ["rank_missing"]


def test_a_token_serves_one_group_at_a_time_and_the_next_one_after_it() -> None:
    name = token()
    for _ in range(2):
        made = Segment.create(name, 4096)
        with pytest.raises(UserError, match="another group") as caught:
            Segment.create(name, 4096)
        assert caught.value.code == "token_in_use"
        made.withdraw()
        Segment.create(name, 4096).close()  # all are in: the name is free, the memory stays
        made.close()
    with pytest.raises(ValueError, match="no token"):
        Segment.open("../etc", 1, 0.0)
    with pytest.raises(ValueError, match="no token"):
        Segment.create("x" * 65, 1)


def test_a_size_that_differs_is_said_with_both_and_lets_the_next_one_in() -> None:
    name = token()
    made = Segment.create(name, 8192)
    wrong, right = Asked(name, 0.0), Asked(name, 0.0)
    made.hand_out()
    with pytest.raises(UserError, match="8192 B of shared memory where 4096 B") as caught:
        wrong.take(4096)
    assert caught.value.code == "ranks_disagree"
    other = right.take(8192)
    made.close()
    other.close()


def same_memory(one: Segment, other: Segment) -> bool:
    """Whether what is written through one is read through the other."""
    word = int.from_bytes(os.urandom(8), "little")
    ctypes.c_uint64.from_address(one.address).value = word
    read = ctypes.c_uint64.from_address(other.address).value
    return one.address != other.address and read == word


def test_strangers_in_front_cost_nothing() -> None:
    name = token()
    made = Segment.create(name, 4096)
    for word in (b"", b"GET / HTTP/1.1", b""):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(socket_name(name))
        stranger.send(word)
        stranger.close()
    asked = Asked(name, 0.0)
    made.hand_out()
    with_it = asked.take(4096)
    assert same_memory(made, with_it)
    with_it.close()
    made.close()


@pytest.mark.parametrize("there", ["nobody", "busy", "gone"])
def test_rank_0_that_does_not_hand_out_is_missed_in_time(there: str) -> None:
    name = token()
    made = Segment.create(name, 4096) if there != "nobody" else None
    before = time.monotonic()
    with pytest.raises(UserError, match="rank 0 did not set up") as caught:
        if there == "gone":
            assert made is not None
            asked = Asked(name, before + 0.05)
            made.close()
            asked.take(4096)
        Segment.open(name, 4096, before + 0.05)
    assert caught.value.code == "rank_missing" and time.monotonic() > before + 0.05
    if made is not None and there != "gone":
        made.close()


def test_who_stood_in_line_of_a_rank_0_that_went_is_served_by_the_next() -> None:
    name = token()
    made = Segment.create(name, 4096)
    asked = Asked(name, time.monotonic() + 300)
    made.close()
    taken = list[Segment]()
    waiting = threading.Thread(target=lambda: taken.append(asked.take(4096)))
    again = Segment.create(name, 4096)
    waiting.start()
    while not taken:
        again.hand_out()
        time.sleep(0.001)
    waiting.join()
    assert same_memory(again, taken[0])
    taken[0].close()
    again.close()


def test_a_name_says_nothing_of_its_token_and_fits() -> None:
    tokens = ["a", "b", "a-b", "x" * 64]
    names = [socket_name(each) for each in tokens]
    assert len(set(names)) == 4 and all(name[0] == "\0" and len(name) < 108 for name in names)
    assert not any(each in name for each, name in zip(tokens[2:], names[2:], strict=True))


def test_memory_can_neither_shrink_nor_grow() -> None:
    """A peer that has cut it would end all others by a bus error."""
    name = token()
    made = Segment.create(name, 8192)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(socket_name(name))
        made.hand_out()
        _, (descriptor,), *_ = socket.recv_fds(line, 1, 1)
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    assert os.fstat(descriptor).st_size == 8192
    os.close(descriptor)
    made.close()


def test_descriptors_are_given_back() -> None:
    name, folder = token(), Path("/proc/self/fd")

    def meet() -> None:
        made = Segment.create(name, 4096)
        asked, late = Asked(name, 0.0), Asked(name, 0.0)
        made.hand_out()
        other = asked.take(4096)
        late.close()
        with pytest.raises(UserError, match="another group"):
            Segment.create(name, 4096)
        made.close()
        made.withdraw()
        other.close()
        with pytest.raises(UserError, match="in time"):
            Segment.open(name, 4096, 0.0)

    meet()
    before = len(list(folder.iterdir()))
    for _ in range(5):
        meet()
    assert len(list(folder.iterdir())) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_gets_nothing_and_offers_nothing() -> None:
    name = token()
    plain = socket_name(name)[1:]
    made = Segment.create(name, 4096)
    command = [sys.executable, "-S", "-c", STRANGER]
    with subprocess.Popen([*command, "ask", plain], stdout=subprocess.PIPE, text=True) as asking:
        while asking.poll() is None:
            made.hand_out()
            time.sleep(0.001)
        assert asking.stdout is not None and asking.stdout.read() == "(b'', [])\n"
    made.close()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "offer", plain], **pipes) as offering:
        assert offering.stdin is not None and offering.stdout is not None
        assert offering.stdout.readline() == "here\n"
        with pytest.raises(UserError, match=r"offered by user 65534, .* user 0's") as caught:
            Segment.open(name, 4096, time.monotonic() + 300)
        assert caught.value.code == "foreign_rank"
        with pytest.raises(UserError, match="another group"):
            Segment.create(name, 4096)
        offering.communicate("\n")


def test_each_end_looks_at_whose_process_the_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for who is not root: the kernel's word is replaced."""
    name, mine = token(), segment._user_of
    made = Segment.create(name, 4096)
    asked = Asked(name, time.monotonic() + 300)
    monkeypatch.setattr(segment, "_user_of", lambda line: mine(line) + 1)
    made.hand_out()
    with pytest.raises(UserError, match="is offered by user"):
        asked.take(4096)  # it was shown the door, and now sees another user behind it
    monkeypatch.undo()
    made.close()


# no memory


def test_shortage_has_numbers_and_unknown_is_no_shortage() -> None:
    assert shortage(10, 10, "here") == shortage(1 << 60, None, "not known") == ""
    assert shortage(4_000_000_001, 4_000_000_000, "MemAvailable in /proc/meminfo") == (
        "the ranks share 4,000,000,001 B of host memory, and 4,000,000,000 B can be had "
        "(MemAvailable in /proc/meminfo)."
    )


def test_too_much_is_refused_before_the_kernel_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = token()
    taken: list[int] = []
    monkeypatch.setattr(segment.os, "posix_fallocate", lambda fd, at, size: taken.append(size))
    with pytest.raises(
        UserError, match=r"share 1,152,921,504,606,846,976 B .* can be had"
    ) as caught:
        Segment.create(name, 1 << 60)
    assert caught.value.code == "no_shared_memory" and "--chunk-tokens" in caught.value.remedy
    assert taken == [] and leftovers(name) == []


@pytest.mark.parametrize("step", ["memfd_create", "posix_fallocate"])
def test_what_the_kernel_refuses_is_one_line(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    name = token()
    monkeypatch.setattr(segment.os, step, refuse)
    with pytest.raises(UserError, match="8,192 B of shared memory cannot be had: No space"):
        Segment.create(name, 8192)
    monkeypatch.undo()
    Segment.create(name, 8192).close()


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EPERM, "forbids Unix sockets"),
        (errno.EACCES, "forbids Unix sockets"),
        (errno.ENOMEM, "Free memory"),
    ],
)
@pytest.mark.parametrize("step", ["socket", "bind", "listen", "connect", "accept"])
def test_what_stands_against_a_socket_is_told_with_what_to_do(
    step: str, number: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of it stays open."""

    class Refused(socket.socket):
        def __init__(self, *given: object, **named: object) -> None:
            refuse("socket")
            super().__init__(*given, **named)  # type: ignore[arg-type]

        def bind(self, where: object) -> None:
            refuse("bind")
            super().bind(where)  # type: ignore[arg-type]

        def listen(self, most: int = 0) -> None:
            refuse("listen")
            super().listen(most)

        def connect(self, where: object) -> None:
            refuse("connect")
            super().connect(where)  # type: ignore[arg-type]

        def accept(self) -> tuple[socket.socket, object]:
            refuse("accept")
            return super().accept()

    def refuse(at: str) -> None:
        if at == step:
            raise OSError(number, os.strerror(number))

    folder, name = Path("/proc/self/fd"), token()
    Segment.create(name, 4096).close()
    before = len(list(folder.iterdir()))
    monkeypatch.setattr(segment.socket, "socket", Refused)
    told = list[UserError]()
    if step != "connect":
        with pytest.raises(UserError) as caught:
            made = Segment.create(name, 4096)
            try:
                made.hand_out()
            finally:
                made.close()
        told.append(caught.value)
    if step in ("socket", "connect"):
        with pytest.raises(UserError) as caught:
            Asked(name, time.monotonic() + 3600)
        told.append(caught.value)
    monkeypatch.undo()
    assert len(list(folder.iterdir())) == before
    for error in told:
        assert error.code == "no_shared_memory" and advice in error.remedy
        assert os.strerror(number) in error.cause
    Segment.create(name, 4096).close()


def test_no_descriptor_left_for_the_memory_is_said_by_whoever_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Segment.create(token(), 4096)
    ours, theirs = socket.socketpair()
    asked = object.__new__(Asked)
    asked._line, asked._deadline, asked._look = ours, time.monotonic() + 3600, lambda: None
    theirs.send(b"x")  # as of a descriptor that did not fit
    with pytest.raises(UserError, match="no descriptor is left") as caught:
        asked.take(4096)
    assert "ulimit -n" in caught.value.remedy
    theirs.close()
    made.close()


def test_who_waits_for_rank_0_looks_whether_it_is_still_worth_it() -> None:
    """In line before it is there, behind it while it does not serve, and after it went."""
    name, looks = token(), list[float]()

    def look(most: int) -> None:
        looks.append(time.monotonic())
        if len(looks) > most:
            raise RuntimeError("enough")

    hour = time.monotonic() + 3600
    with pytest.raises(RuntimeError, match="enough"):
        Asked(name, hour, lambda: look(3))
    for gone in (False, True):
        looks.clear()
        made = Segment.create(name, 4096)
        asked = Asked(name, hour, lambda: look(3))
        if gone:
            made.close()
        with pytest.raises(RuntimeError, match="enough"):
            asked.take(4096)
        if not gone:
            made.close()


def test_a_kernel_before_6_3_is_asked_without_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    make = os.memfd_create

    def older(name: str, flags: int) -> int:
        asked.append(flags & 8)
        if flags & 8:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return make(name, flags)

    monkeypatch.setattr(segment.os, "memfd_create", older)
    Segment.create(token(), 4096).close()
    assert asked == [8, 0]
