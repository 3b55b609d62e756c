"""What a captured step may not do, seen on CPU; and a graph of torch operators that is replayed.

A captured step runs on the device alone, with the shapes that it was captured with. On CPU every
operator can be watched: `HostReads` notes each that hands a value to the host, or gives a result
whose shape depends on values. `RecordedGraph` stands for a device's graph: it keeps the operators
that a step ran with the very tensors they ran on, and runs them again without the step's Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim",
    "_unique", "_unique2", "unique_consecutive", "unique_dim_consecutive", "bincount", "histc",
    "nonzero_numpy", "argwhere",
)  # fmt: skip
"""Operators that answer the host, or whose result's shape depends on values."""

METHODS = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that hand values over; some of them are no operators on CPU."""


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes, in `found`, every read by the host as ``operator`` or ``operator in where()``."""

    def __init__(self, where: Callable[[], str] = lambda: "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self._where = where

    def __enter__(self) -> Any:
        self._kept = {name: getattr(Tensor, name) for name in METHODS}
        for name, method in self._kept.items():
            setattr(Tensor, name, self._watched(name, method))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for name, method in self._kept.items():
            setattr(Tensor, name, method)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in READS or _by_mask(name, args) or _unsized(func, args, kwargs):
            self.note(name)
        found = func(*args, **kwargs)
        if name in ("_to_copy", "copy_", "_copy_from") and _crosses(args, found):
            self.note(f"{name} between devices")
        return found

    def note(self, what: str) -> None:
        where = self._where()
        self.found.append(f"{what} in {where}" if where else what)

    def _watched(self, name: str, method: Any) -> Any:
        def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return method(tensor, *args, **kwargs)

        return watched


def _by_mask(name: str, args: Sequence[Any]) -> bool:
    """Indexing by a mask counts its ones first."""
    if not name.startswith(("index", "_index_put")) or len(args) < 2:
        return False
    indices = args[1] if isinstance(args[1], list | tuple) else ()
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _unsized(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    return func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None


def _crosses(args: Sequence[Any], found: Any) -> bool:
    devices = {leaf.device for leaf in tree_leaves((args, found)) if isinstance(leaf, Tensor)}
    return len(devices) > 1


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of one run; `replay` runs them again, on the same tensors.

    What an operator made anew is overwritten by the replay; between replays `poison` fills all of
    it with NaN and large numbers, so that nothing may live on from one replay to the next.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._made: list[Tensor] = []
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        found = func(*args, **kwargs)
        fresh = [
            leaf
            for leaf in tree_leaves(found)
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in before
        ]
        # A view of what was there needs no second run; what is written in place does.
        if fresh or func._schema.is_mutable:
            self._steps.append((func, args, kwargs, found))
        self._made += fresh
        return found

    @property
    def operators(self) -> int:
        return len(self._steps)

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, kept in self._steps:
            found = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(kept), tree_leaves(found), strict=True):
                    if isinstance(old, Tensor):
                        assert old.shape == new.shape, f"{func} changed its shape"
                        old.copy_(new)

    @torch.inference_mode()
    def poison(self, spare: Sequence[Tensor] = ()) -> None:
        """Overwrite all that the run made; `spare`: results that are still to be read."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in spare}
        for tensor in self._made:
            if tensor.untyped_storage().data_ptr() in kept or not tensor.numel():
                continue
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor.fill_(float("nan"))
            elif tensor.dtype is not torch.bool and not tensor.is_floating_point():
                tensor.fill_(torch.iinfo(tensor.dtype).max)


@contextmanager
def recorded() -> Iterator[RecordedGraph]:
    """Inside, what runs becomes a graph."""
    graph = RecordedGraph()
    with graph:
        yield graph
