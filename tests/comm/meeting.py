"""Ranks that meet in shared memory or die on their way: ``meeting.py COUNT SEED``.

Each of COUNT scenes is two groups at once, of 2 to 5 ranks that start in a drawn order with drawn
delays; one rank of a group may die at a point of its way, and strangers knock at the doors. Prints
a JSON list: a scene's draws, and what each rank found, by group. A rank reports by the words of the
memory itself, and by a pipe that it was let in; only what cannot come is waited for by a clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass

from metainfer.comm.segment import Asked, Segment, socket_name
from metainfer.core.errors import UserError

SIZE = 8192
PATIENCE_S = 300.0  # for what comes
IN_VAIN_S = 0.2  # for what cannot
POINTS = ("", "before", "made or asked", "after")


@dataclass
class Group:
    """`dies`: a rank or -1, at `point`. `wrong`: a rank that expects another size, or -1."""

    token: str
    world: int
    dies: int
    point: str
    wrong: int


def drawn(rng: random.Random, token: str) -> Group:
    world, point = rng.randint(2, 5), rng.choice(POINTS)
    dies = rng.randrange(world) if point else -1
    others = [rank for rank in range(1, world) if rank != dies]
    wrong = rng.choice(others) if others and rng.random() < 0.2 else -1
    return Group(token, world, dies, point, wrong)


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def word(segment: Segment, place: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(segment.address + 8 * place)


def lead(group: Group, ready: int, told: int) -> str:
    """Rank 0: makes the memory, hands it out until it is told to stop."""
    dies = group.point if group.dies == 0 else ""
    if dies == "before":
        end()
    made = Segment.create(group.token, SIZE)
    word(made, 0).value = 1
    if dies == "made or asked":
        end()
    os.set_blocking(told, False)
    os.write(ready, b"r")
    while True:
        made.hand_out()
        try:
            if os.read(told, 1):
                break
        except BlockingIOError:
            time.sleep(0.0005)
    if dies == "after":
        end()
    made.withdraw()
    found = [word(made, rank).value for rank in range(group.world)]
    made.close()
    return json.dumps(found)


def follow(group: Group, rank: int, ready: int, told: int) -> str:
    dies = group.point if group.dies == rank else ""
    if dies == "before":
        end()
    vain = group.dies == 0 and group.point != "after"
    deadline = time.monotonic() + (IN_VAIN_S if vain else PATIENCE_S)
    asked = Asked(group.token, deadline)
    if dies == "made or asked":
        end()
    mine = asked.take(SIZE if group.wrong != rank else 2 * SIZE)
    word(mine, rank).value = rank + 1
    if dies == "after":
        end()
    os.write(ready, b"r")
    os.read(told, 1)  # rank 0 may be dead by now: the memory is here
    found = [word(mine, each).value for each in range(group.world)]
    mine.close()
    return json.dumps(found)


def forked(group: Group, rank: int, wait_s: float) -> tuple[int, int, int, int]:
    """Process, and pipes: that it is ready, what it is told, its answer."""
    ready, told, answer = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        time.sleep(wait_s)
        try:
            if rank == 0:
                text = lead(group, ready[1], told[0])
            else:
                text = follow(group, rank, ready[1], told[0])
        except UserError as error:
            text = json.dumps(error.code)
        except BaseException as error:  # noqa: BLE001 - shown to the test
            text = json.dumps(f"{type(error).__name__}: {error}")
        os.write(answer[1], text.encode())
        os._exit(0)
    for mine in (ready[1], told[0], answer[1]):
        os.close(mine)
    return pid, ready[0], told[1], answer[0]


def knock(group: Group, rng: random.Random) -> socket.socket | None:
    """Somebody connects, says rubbish or nothing, and hangs up or stays."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.setblocking(False)
    with contextlib.suppress(OSError):
        stranger.connect(socket_name(group.token))
        if rng.random() < 0.5:
            stranger.send(rng.randbytes(rng.randrange(1, 2000)))
    if rng.random() < 0.5:
        stranger.close()
        return None
    return stranger


def play(rng: random.Random, groups: list[Group]) -> list[list[object]]:
    order = [(group, rank) for group in groups for rank in range(group.world)]
    rng.shuffle(order)
    ranks = {}
    strangers = []
    for group, rank in order:
        ranks[group.token, rank] = forked(group, rank, rng.random() * 0.004)
        if rng.random() < 0.5:
            strangers.append(knock(group, rng))
    for group in groups:
        strangers.append(knock(group, rng))
        for rank in range(1, group.world):  # then rank 0, then the others
            os.read(ranks[group.token, rank][1], 1)  # empty of one that ended
        strangers += [knock(group, rng) for _ in range(3)]  # to an open door, where there is one
        for rank in range(group.world):
            with contextlib.suppress(BrokenPipeError):
                os.write(ranks[group.token, rank][2], b"x")
            if rank == 0 and group.dies == 0:
                os.waitpid(ranks[group.token, 0][0], 0)
    found: list[list[object]] = []
    for group in groups:
        found.append([])
        for rank in range(group.world):
            pid, *pipes = ranks[group.token, rank]
            with open(pipes[2], "rb") as answer:
                text = answer.read()
            found[-1].append(json.loads(text) if text else "dead")
            if not (rank == 0 and group.dies == 0):
                os.waitpid(pid, 0)
            os.close(pipes[0])
            os.close(pipes[1])
    del strangers
    return found


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    count, rng = int(sys.argv[1]), random.Random(int(sys.argv[2]))
    scenes = []
    for index in range(count):
        groups = [drawn(rng, f"{os.getpid()}-{index}-{name}".ljust(64, "x")) for name in "ab"]
        found = play(rng, groups)
        again = []
        for group in groups:  # whatever became of it, its token can be used anew
            made = Segment.create(group.token, SIZE)
            again.append(word(made, 0).value)
            made.close()
        scenes.append({"groups": [asdict(g) for g in groups], "found": found, "again": again})
    print(json.dumps(scenes))


if __name__ == "__main__":
    main()
