"""Who did the work? Fails when something heavy runs outside the ops of the table.

A model that multiplies matrices by hand would escape selection, counting and qualification. Run one
forward step inside `only_ops`: every aten operation above a limit must be inside a table op.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from metainfer.core.errors import InternalError
from metainfer.kernels.table import Trace

LIMIT_FLOP = 1_000_000


@dataclass(frozen=True, slots=True)
class Outside:
    """One heavy operation that no table op contains."""

    operation: str
    flop: int
    shapes: tuple[tuple[int, ...], ...]


def work(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOP of one aten operation: exact for matrix products and attention, else one per element
    of the result. Views are free."""
    counter = flop_registry.get(function.overloadpacket)
    if counter is not None:
        return int(counter(*args, **kwargs, out_val=result))
    if function.is_view:
        return 0
    return sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, trace: Trace, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.limit = trace, limit
        self.found: list[Outside] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.trace.inside:
            flop = work(func, args, kwargs or {}, result)
            if flop > self.limit:
                tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                shapes = tuple(tuple(tensor.shape) for tensor in tensors)
                self.found.append(Outside(str(func), flop, shapes))
        return result


@contextmanager
def only_ops(trace: Trace, limit: int = LIMIT_FLOP) -> Iterator[list[Outside]]:
    """Watch until the block ends; `trace` is that of the table in use.

    Raises:
        InternalError: naming every operation above `limit` that ran outside a table op.
    """
    watch = _Watch(trace, limit)
    with watch:
        yield watch.found
    if watch.found:
        listed = "; ".join(
            f"{item.operation} {list(map(list, item.shapes))} ({item.flop / 1e6:.1f} MFLOP)"
            for item in watch.found
        )
        raise InternalError(f"work outside the ops: {listed}")
