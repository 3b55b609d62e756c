"""Backend `nccl`: torch's NCCL group, the fallback and the one to beat. Class `native`: several
roundings, an order that follows from its algorithm."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from metainfer.comm.backends.calls import checked
from metainfer.comm.errors import CommError
from metainfer.comm.plan import CommPlan
from metainfer.comm.request import Op


class NcclComm:
    """One rank of `world`, met through the file `store`; `device` is this rank's."""

    def __init__(
        self, store: Path, rank: int, world: int, *, device: int, budget_s: float = 60.0
    ) -> None:
        self.rank, self.world = rank, world
        torch.cuda.set_device(device)
        torch_dist: Any = dist
        torch_dist.init_process_group(
            "nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=budget_s),
            device_id=torch.device("cuda", device),
        )

    def run(self, plan: CommPlan, given: Tensor, out: Tensor | None = None) -> Tensor:
        """Enqueue `plan` on the current stream.

        Raises:
            CommError: NCCL reports a failure.
        """
        request = plan.request
        torch_dist: Any = dist
        out = checked(request, self.rank, given, out, "cuda")
        try:
            if request.op is Op.ALL_REDUCE or request.op is Op.BROADCAST:
                if out.data_ptr() != given.data_ptr():
                    out.copy_(given)
                if request.op is Op.ALL_REDUCE:
                    torch_dist.all_reduce(out)
                else:
                    torch_dist.broadcast(out, request.root)
            elif request.op is Op.REDUCE_SCATTER:
                torch_dist.reduce_scatter_tensor(out, given)
            elif request.op is Op.ALL_GATHER:
                torch_dist.all_gather_into_tensor(out, given)
            elif request.op is Op.ALL_TO_ALL:
                torch_dist.all_to_all_single(out, given)
            else:
                torch_dist.barrier()
        except RuntimeError as error:
            text = f"{request.name} failed on rank {self.rank}: {str(error).splitlines()[0]}"
            raise CommError(text) from error
        return out

    def close(self) -> None:
        """Leave the group."""
        torch_dist: Any = dist
        torch_dist.destroy_process_group()
