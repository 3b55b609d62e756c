"""Rank processes for tests: ``forked.py TOKEN FOLDER SCENE:WORLD ...``.

One interpreter loads torch, then forks the ranks of one scene after the other; each writes what it
found to ``FOLDER/SCENE-WORLD-RANK.json``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks import leftovers, plan_of
from test_local import ALGORITHMS, expected, inputs, same

from metainfer.comm import layout
from metainfer.comm.agree import DisagreementError, agree
from metainfer.comm.backends import shm_cpu
from metainfer.comm.backends.shm_cpu import ShmComm, share
from metainfer.comm.backends.slabs import gather_bytes
from metainfer.comm.errors import CommError
from metainfer.comm.exact import canonical_sum
from metainfer.comm.request import Op, Request
from metainfer.comm.segment import Asked, Segment
from metainfer.core.errors import MetaInferError, UserError

Found = dict[str, object]


def reduce_plan(world: int, count: int = 4096, algorithm: str = "one_shot"):
    request = Request(op=Op.ALL_REDUCE, count=count, dtype="bfloat16", world=world)
    return plan_of(request, algorithm, "shm_cpu")


def ops(token: str, rank: int, world: int) -> Found:
    """Every op at many sizes, one line per op that is not exact."""
    wrong = []
    dtypes = ("bfloat16", "float16", "float32", "float64") if world == 2 else ("bfloat16",)
    with ShmComm.open(token, rank, world, slot_bytes=1 << 16, first_call=(1 << 40) - 20) as comm:
        for op, algorithm in ALGORITHMS:
            for count in (0, 1, 8 * world, 40_001):
                if op is Op.ALL_TO_ALL:
                    count = count // world * world
                for dtype in dtypes:
                    request = Request(op=op, count=count, dtype=dtype, world=world, root=1)
                    given = inputs(request, count)
                    found = comm.run(plan_of(request, algorithm, "shm_cpu"), given[rank])
                    if not same(found, expected(request, given, rank)):
                        wrong.append(f"{request.name} {algorithm}")
        barrier = Request(op=Op.BARRIER, count=0, dtype="uint8", world=world)
        comm.run(plan_of(barrier, "direct", "shm_cpu"), torch.empty(0, dtype=torch.uint8))
        texts = gather_bytes(comm, lambda r: plan_of(r, "direct", "shm_cpu"), b"r" * rank)
    return {"wrong": wrong, "texts": [len(text) for text in texts]}


def large(token: str, rank: int, world: int) -> Found:
    """64 MB and an odd count, both algorithms, against the canonical sum."""
    count = (64 << 20) // 2 + 3
    given = [torch.full((count,), 1.0 / (3 + each), dtype=torch.bfloat16) for each in range(world)]
    for each in range(world):
        given[each][::7919] = -float(each)
    want = canonical_sum(given)
    with ShmComm.open(token, rank, world) as comm:
        found = [
            bool(torch.equal(comm.run(reduce_plan(world, count, name), given[rank]), want))
            for name in ("one_shot", "two_shot")
        ]
    return {"right": found}


def crash(token: str, rank: int, world: int) -> Found:
    """Rank 1 is killed between two calls; the others say so although they have an hour."""
    plan, given = reduce_plan(world), torch.ones(4096, dtype=torch.bfloat16)
    with ShmComm.open(token, rank, world, budget_s=3600.0) as comm:
        for _ in range(20):
            comm.run(plan, given)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                comm.run(plan, given)
        except CommError as error:
            return {"error": str(error), "peer": error.peer}


def stop(token: str, rank: int, world: int) -> Found:
    """Rank 1 stands still: rank 0 runs out of time and says of what, rank 2 hears of it."""
    plan, given = reduce_plan(world), torch.ones(4096, dtype=torch.bfloat16)
    with ShmComm.open(token, rank, world) as comm:
        comm.run(plan, given)
        if rank == 0:
            stat = Path(f"/proc/{comm._word(1, layout.AT_PID)}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            comm.budget_s = 2.0
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return {}
        try:
            comm.run(plan, given)
        except CommError as error:
            return {"error": str(error), "peer": error.peer, "secondary": error.secondary}
    return {}


def leave(token: str, rank: int, world: int) -> Found:
    """Rank 1 leaves in order after call 5; rank 0 leaves at once after a last common call."""
    plan, given = reduce_plan(world), torch.ones(4096, dtype=torch.bfloat16)
    comm = ShmComm.open(token, rank, world)
    for _ in range(5):
        comm.run(plan, given)
    if rank == 1:
        comm.close()
        comm.close()
        try:
            comm.run(plan, given)
        except CommError as error:
            return {"error": str(error), "peer": error.peer}
    try:
        comm.run(plan, given)
    except CommError as error:
        comm.close()
        return {"error": str(error), "peer": error.peer}
    return {}


def quiet_end(token: str, rank: int, world: int) -> Found:
    """All leave right after a call, at different times: nobody may mistake that for a failure."""
    plan, given = reduce_plan(world), torch.ones(4096, dtype=torch.bfloat16)
    errors = []
    for turn in range(40):
        try:
            with ShmComm.open(f"{token}-{turn}", rank, world, slot_bytes=8192) as comm:
                comm.run(plan, given)
        except MetaInferError as error:
            errors.append(str(error))
    return {"errors": errors}


def absent(token: str, rank: int, world: int) -> Found:
    """The last rank never comes."""
    if rank == world - 1:
        return {}
    try:
        ShmComm.open(token, rank, world, open_s=3.0)  # in which the other one surely comes
    except MetaInferError as error:
        return {"error": str(error)}
    return {}


def disagree(token: str, rank: int, world: int) -> Found:
    """Rank 1 has planned otherwise: all stop with the same words."""
    with ShmComm.open(token, rank, world) as comm:
        mine = {"plan": "a", "capacity": 100 if rank != 1 else 99}

        def exchange(text: bytes) -> list[bytes]:
            return gather_bytes(comm, lambda r: plan_of(r, "direct", "shm_cpu"), text)

        same = agree("capacity", {"plan": "a"}, exchange)
        try:
            agree("capacity", mine, exchange)
        except DisagreementError as error:
            return {"error": str(error), "same": same}
    return {}


def more(token: str, rank: int, world: int) -> Found:
    """Each writes its word into memory that the group shares beside its own; rank 2 asks late."""

    def make(request: Request):
        return plan_of(request, "direct", "shm_cpu")

    def late(*given: Any) -> Asked:
        time.sleep(0.2)  # as others are handed theirs, if rank 0 does not wait for this one
        return Asked(*given)

    if rank == 2:
        shm_cpu.Asked = late  # type: ignore[misc, assignment]
    with ShmComm.open(token, rank, world, slot_bytes=8192) as comm:
        memory = share(comm, f"{token}-more", make, 1 << 20)
        words = (ctypes.c_uint64 * world).from_address(memory.address + (1 << 20) - 8 * world)
        words[rank] = rank + 1
        gather_bytes(comm, make, b"")
        return {"words": list(words), "open": leftovers(token, f"{token}-more")}


def short(token: str, rank: int, world: int) -> Found:
    """Rank 0 cannot have it, and says so as a rank does."""

    def none(*arguments: object) -> Segment:
        raise UserError("no memory on rank 0")

    with ShmComm.open(token, rank, world, slot_bytes=8192) as comm:
        Segment.create = none  # type: ignore[method-assign, assignment]
        try:
            share(comm, f"{token}-more", lambda r: plan_of(r, "direct", "shm_cpu"), 4096)
        except MetaInferError as error:
            comm.abort(str(error))
            return {"kind": type(error).__name__, "error": str(error)}
    return {}


def unserved(token: str, rank: int, world: int) -> Found:
    """All stand in line, and rank 0 cannot hand out."""

    def fails(segment: Segment) -> None:
        raise UserError("no descriptor on rank 0")

    with ShmComm.open(token, rank, world, slot_bytes=8192) as comm:
        Segment.hand_out = fails  # type: ignore[method-assign]
        try:
            share(comm, f"{token}-more", lambda r: plan_of(r, "direct", "shm_cpu"), 4096)
        except MetaInferError as error:
            if world == 3:  # where two are, it leaves without a word
                comm.abort(str(error))
            return {"kind": type(error).__name__, "error": str(error)}
    return {}


SCENES: dict[str, Callable[[str, int, int], Found]] = {
    "ops": ops,
    "large": large,
    "crash": crash,
    "stop": stop,
    "leave": leave,
    "quiet_end": quiet_end,
    "absent": absent,
    "disagree": disagree,
    "more": more,
    "short": short,
    "unserved": unserved,
}


def play(scene: str, world: int, token: str, folder: Path) -> None:
    children = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                found = SCENES[scene](token, rank, world)
            except BaseException:  # noqa: BLE001 - shown to the test
                found = {"bug": traceback.format_exc()}
            part = folder / f"{scene}-{world}-{rank}.part"
            part.write_text(json.dumps(found))
            part.rename(part.with_suffix(".json"))
            os._exit(0)
        children[pid] = rank
    if scene == "stop":  # rank 1 stands still for good
        stopped = next(pid for pid, rank in children.items() if rank == 1)
        while len(list(folder.glob("stop-*.json"))) < world - 1:
            time.sleep(0.02)
        os.kill(stopped, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def main() -> None:
    token, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    for index, scene in enumerate(sys.argv[3:]):
        name, _, world = scene.partition(":")
        play(name, int(world), f"{token}-{index}", folder)


if __name__ == "__main__":
    main()
