"""Workers of `ProcessGroup` that meet in collectives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from ranks import plan_of
from test_local import ALGORITHMS, expected, inputs, same

from metainfer.comm.backends.gloo import GlooComm
from metainfer.comm.backends.shm_cpu import ShmComm
from metainfer.comm.request import Op, Request
from metainfer.workers.wire import RankFacts


class Reducer:
    """Joins the group's shared memory when made."""

    def __init__(self, facts: RankFacts) -> None:
        torch.set_num_threads(1)
        self.rank, self.world = facts.rank, facts.world
        self.comm = ShmComm.open(facts.token, facts.rank, facts.world, budget_s=3600.0)
        request = Request(op=Op.ALL_REDUCE, count=4096, dtype="float64", world=facts.world)
        self.plan = plan_of(request, "two_shot", "shm_cpu")

    def step(self, value: float) -> float:
        given = torch.full((4096,), value + self.rank, dtype=torch.float64)
        return float(self.comm.run(self.plan, given)[-1])

    def step_but(self, rank: int, how: str) -> float:
        """As `step`, but `rank` raises or is killed instead of joining in."""
        if self.rank == rank:
            if how == "raise":
                raise KeyError("model.layers.3")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.step(0.0)

    def abort(self, cause: str) -> None:
        self.comm.abort(cause)

    def close(self) -> None:
        self.comm.close()


class Gloo:
    """One smoke test per op."""

    def __init__(self, facts: RankFacts) -> None:
        torch.set_num_threads(1)
        self.rank, self.world = facts.rank, facts.world
        self.comm = GlooComm(Path(facts.facts["store"]), facts.rank, facts.world)

    def every_op(self) -> list[str]:
        wrong = []
        for op, algorithm in ALGORITHMS:
            count = 999 // self.world * self.world if op is Op.ALL_TO_ALL else 1001
            request = Request(op=op, count=count, dtype="bfloat16", world=self.world, root=1)
            given = inputs(request, count)
            found = self.comm.run(plan_of(request, algorithm, "gloo"), given[self.rank])
            if not same(found, expected(request, given, self.rank)):
                wrong.append(request.name)
        barrier = Request(op=Op.BARRIER, count=0, dtype="uint8", world=self.world)
        self.comm.run(plan_of(barrier, "direct", "gloo"), torch.empty(0, dtype=torch.uint8))
        return wrong

    def close(self) -> None:
        self.comm.close()
