"""One rank of `tune comm`: calls one collective by one method, checks it, times it.

Target of `workers.ranks.ProcessGroup`. All ranks are told the same, so that they call together.
What is timed is what a step pays: in a graph where a method can be captured, else call by call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from metainfer.comm.errors import CommError
from metainfer.comm.exact import canonical_sum
from metainfer.comm.peers import Place
from metainfer.comm.request import Op, Request, shard
from metainfer.core.intent import Intent
from metainfer.engine.machine import open_machine
from metainfer.engine.rank import links_of, own_device
from metainfer.planner.opening import open_model
from metainfer.workers.wire import RankFacts


class CollectivesRank:
    """Opens the groups of a plan's layout as a model would, without the model."""

    def __init__(self, facts: RankFacts) -> None:
        intent = msgspec.convert(facts.facts["intent"], Intent)
        machine = open_machine(intent.platform)
        self._device = own_device(machine.torch_device(), facts.rank, intent)
        resolved = machine.resolve(open_model(intent.model), intent)
        place = Place(resolved.plan.layouts[0], facts.rank)
        self._links = links_of(facts.token, place, self._device, intent, machine.facts, resolved)
        groups = place.groups()
        self._members = {role: ranks.index(facts.rank) for role, ranks in groups.items()}
        if self._device.type == "cpu":
            torch.set_num_threads(1)

    def methods(self, role: str, op: str, count: int, dtype: str) -> list[str]:
        """What could carry a message out, as ``backend:algorithm``; exact ones alone."""
        request = self._request(role, op, count, dtype)
        offers = self._comm(role).offers(request)
        exact = [each for each in offers if each.precision is request.precision]
        return [each.key for each in exact if each.verdict.accepted]

    def check(self, role: str, method: str, op: str, count: int, dtype: str) -> str:
        """What is wrong with a method's result, empty where nothing is: integer values, whose sums
        are exact in any type, and a poisoned result."""
        request = self._request(role, op, count, dtype)
        world, mine = request.world, self._members[role]
        drawn = torch.Generator().manual_seed(count)
        parts = torch.randint(-8, 8, (world, count), generator=drawn).to(getattr(torch, dtype))
        given, wanted = parts[mine], canonical_sum(list(parts))
        if request.op is Op.ALL_GATHER:
            begin, end = shard(count, world, mine)
            given, wanted = parts[0, begin:end], parts[0]
        given = given.contiguous().to(self._device)
        out = torch.full((count,), float("nan"), dtype=given.dtype, device=self._device)
        try:
            self._comm(role).run_by(method, request, given, out)
            self._wait()
            self._links.check()
        except CommError as error:
            return error.cause
        differ = int((out.cpu() != wanted).sum())
        return f"{differ} of {count} elements are wrong" if differ else ""

    def time(self, role: str, method: str, op: str, count: int, dtype: str, repeat: int) -> float:
        """Microseconds of one call among `repeat` that follow each other."""
        request = self._request(role, op, count, dtype)
        begin, end = shard(count, request.world, self._members[role])
        given = torch.zeros(
            end - begin if request.op is Op.ALL_GATHER else count,
            dtype=getattr(torch, dtype),
            device=self._device,
        )
        out = torch.empty(count, dtype=given.dtype, device=self._device)
        comm = self._comm(role)

        def calls() -> None:
            for _ in range(repeat):
                comm.run_by(method, request, given, out)

        step = self._captured(calls) if comm.graph_safe(method, request) else calls
        step()
        self._wait()
        start = time.perf_counter()
        step()
        self._wait()
        return (time.perf_counter() - start) / repeat * 1e6

    def abort(self, cause: str) -> None:
        self._links.abort(cause)

    def close(self) -> None:
        self._links.close()

    def _comm(self, role: str) -> Any:
        return getattr(self._links.ranks, role).comm

    def _request(self, role: str, op: str, count: int, dtype: str) -> Request:
        size = getattr(self._links.ranks, role).size
        return Request(op=Op(op), count=count, dtype=dtype, world=size)

    def _captured(self, calls: Callable[[], None]) -> Callable[[], None]:
        if self._device.type != "cuda":
            return calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        return graph.replay

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
