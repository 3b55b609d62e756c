"""Backend `gloo`: torch's CPU collectives, kept exact by gathering and summing in rank order.

The reference of last resort: slow, without own protocol, but over any network. Every rank gathers
all parts, so an all-reduce moves N - 1 whole messages.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from metainfer.comm.backends.calls import checked
from metainfer.comm.errors import CommError
from metainfer.comm.exact import canonical_sum
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import Op, shard


class GlooComm:
    """One rank of `world`, met through the file `store` (a new one for each group)."""

    def __init__(self, store: Path, rank: int, world: int, *, budget_s: float = 30.0) -> None:
        self.rank, self.world = rank, world
        torch_dist: Any = dist  # its stubs leave out half of these classes
        file = torch_dist.FileStore(str(store), world)
        limit = timedelta(seconds=budget_s)
        self._group: Any = torch_dist.ProcessGroupGloo(file, rank, world, limit)

    def run(self, plan: CommPlan, given: Tensor, out: Tensor | None = None) -> Tensor:
        """Carry out `plan`; as `SlabComm.run`, without sides and epilogues.

        Raises:
            CommError: a peer is gone or did not answer in time.
        """
        request = plan.request
        out = checked(request, self.rank, given, out)
        try:
            self._run(plan, given, out)
        except RuntimeError as error:
            text = f"{request.name} failed on rank {self.rank}: {str(error).splitlines()[0]}"
            raise CommError(text) from error
        return out

    def _run(self, plan: CommPlan, given: Tensor, out: Tensor) -> None:
        request = plan.request
        if request.op is Op.BARRIER:
            self._group.barrier().wait()
            return
        if request.op is Op.BROADCAST:
            if self.rank == request.root:
                out.copy_(given)
            self._group.broadcast(_bytes(out), request.root).wait()
            return
        begin, end = shard(request.count, self.world, self.rank)
        parts = self._gather(given, request.count, padded=request.op is Op.ALL_GATHER)
        if request.op is Op.ALL_REDUCE:
            out.view(-1).copy_(canonical_sum(parts))
        elif request.op is Op.REDUCE_SCATTER:
            out.view(-1).copy_(canonical_sum([part[begin:end] for part in parts]))
        elif request.op is Op.ALL_GATHER:
            out.view(-1).copy_(torch.cat(parts))
        else:
            block = request.count // self.world
            mine = slice(self.rank * block, (self.rank + 1) * block)
            out.view(-1).copy_(torch.cat([part[mine] for part in parts]))

    def _gather(self, given: Tensor, count: int, *, padded: bool) -> list[Tensor]:
        """Everyone's input; shards of unequal length are padded on the wire."""
        flat = given.reshape(-1)
        if padded:
            room = -(-count // self.world)
            flat = torch.cat([flat, flat.new_zeros(room - flat.numel())])
        parts = [torch.empty_like(flat) for _ in range(self.world)]
        if flat.numel():
            self._group.allgather([[_bytes(part) for part in parts]], [_bytes(flat)]).wait()
        if not padded:
            return parts
        bounds = [shard(count, self.world, rank) for rank in range(self.world)]
        return [part[: end - begin] for part, (begin, end) in zip(parts, bounds, strict=True)]

    def close(self) -> None:
        """Leave the group."""
        del self._group


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
