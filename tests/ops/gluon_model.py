"""Gluon kernels on the host: what a program means, with everything asynchronous made late.

Stands for Triton's Gluon modules while a kernel's file is loaded, and runs one program after the
other on torch tensors. Layouts are ignored. A copy poisons its target when it starts and arrives
when it is waited for; a matrix product must find the same operands when it starts and when it is
waited for. So a missing wait, a buffer taken too early or a stale tile shows as a wrong result
or an `AssertionError`. Fences, barriers and layouts are for the card (``-m gpu``).
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Value(Tensor):
    """A tensor whose `type` has a layout, as Gluon's."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:  # type: ignore[override]
        return value(self.view(dtype) if bitcast else super().to(dtype))


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


class Pointer:
    """Elements of a flat tensor at `at`."""

    type = SimpleNamespace(layout=None)

    def __init__(self, data: Tensor, at: Any = 0) -> None:
        self.data, self.at = data, at
        self.dtype = SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.at + offset)

    def read(self, mask: Any = None, other: Any = None) -> Value:
        at = torch.as_tensor(self.at)
        if mask is None:
            return value(self.data[at])
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(mask))
        found = torch.zeros(at.shape, dtype=self.data.dtype)
        if other is not None:
            found.fill_(other)
        _bits(found)[mask] = _bits(self.data)[at[mask]]
        return value(found)

    def write(self, x: Any, mask: Any = True) -> None:
        x = torch.as_tensor(x).to(self.data.dtype).as_subclass(Tensor)
        at, x, mask = torch.broadcast_tensors(torch.as_tensor(self.at), x, torch.as_tensor(mask))
        self.data[at[mask]] = x[mask]


def _bits(x: Tensor) -> Tensor:
    """Numbers of one byte as bytes, which torch indexes."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _poison(x: Tensor) -> None:
    """NaN; integers that stand for nothing."""
    x.fill_(torch.nan if x.is_floating_point() else 0x7FC07FC0)


class Memory:
    """Shared memory: poison until it is written."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, i: Any) -> Memory:
        return Memory(self.data[int(i)])

    def slice(self, first: Any, length: int, axis: int) -> Memory:
        return Memory(self.data.narrow(axis, int(first), length))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.data.permute(order))

    def store(self, x: Tensor) -> None:
        self.data.copy_(x)

    def load(self, layout: object) -> Value:
        return value(self.data.clone())


class Product:
    """A matrix product under way."""

    def __init__(self, a: Memory | Value, b: Memory, add: Tensor) -> None:
        self.a = a if isinstance(a, Memory) else Memory(a)
        self.b, self.add = b, add
        self.operands = (self.a.data.clone(), b.data.clone())
        self.done: Value | None = None

    def finish(self) -> None:
        for now, then in zip((self.a.data, self.b.data), self.operands, strict=True):
            now, then = now.to(self.add.dtype), then.to(self.add.dtype)
            assert torch.equal(now.nan_to_num(7), then.nan_to_num(7)), "an operand changed"
        a, b = (part.to(self.add.dtype) for part in self.operands)
        assert not (a.isnan().any() or b.isnan().any()), "an operand had not arrived"
        self.done = value(self.add + a @ b)


class Machine:
    """The state of one program, and the functions that a kernel sees."""

    def __init__(self) -> None:
        self.ids: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()
        self.copies: list[list[tuple[Memory, Pointer, Any]]] = []
        self.open: list[tuple[Memory, Pointer, Any]] = []
        self.products: list[Product] = []

    def start(self, ids: tuple[int, ...]) -> None:
        assert not self.products, "a program ended before its products"
        self.ids, self.copies, self.open = ids, [], []

    def copy(self, target: Memory, source: Pointer, mask: Any = None) -> None:
        _poison(target.data)
        self.open.append((target, source, mask))

    def commit(self) -> None:
        self.copies.append(self.open)
        self.open = []

    def wait_copies(self, left: int) -> None:
        while len(self.copies) > left:
            for target, source, mask in self.copies.pop(0):
                target.data.copy_(source.read(mask))

    def multiply(
        self,
        a: Memory | Value,
        b: Memory,
        add: Tensor,
        use_acc: bool = True,
        is_async: bool = False,
    ) -> Product:
        assert is_async
        self.products.append(Product(a, b, add if use_acc else torch.zeros_like(add)))
        return self.products[-1]

    def wait_products(self, left: int, deps: list[Product]) -> Any:
        while len(self.products) > left:
            self.products.pop(0).finish()
        assert all(dep.done is not None for dep in deps), "read before it was waited for"
        found = [dep.done for dep in deps]
        return found[0] if len(found) == 1 else tuple(found)


class Kernel:
    """`kernel[grid](...)`, tensors as pointers."""

    def __init__(self, body: Callable[..., None], machine: Machine) -> None:
        self.body, self.machine = body, machine

    def __call__(self, *args: Any) -> Any:
        return self.body(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            self.machine.grid = grid
            given = [Pointer(a.view(-1)) if isinstance(a, Tensor) else a for a in args]
            for ids in itertools.product(*map(range, grid)):
                self.machine.start(ids)
                self.body(*given)

        return launch


def _allocated(dtype: torch.dtype, shape: list[int], layout: object) -> Memory:
    held = Memory(torch.zeros([int(n) for n in shape], dtype=dtype))
    _poison(held.data)
    return held


def _language(machine: Machine) -> ModuleType:
    gl = ModuleType("triton.experimental.gluon.language")
    anything = lambda *args, **more: None  # noqa: E731
    for name in (
        "NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "NVMMASharedLayout", "barrier",
        "DotOperandLayout", "SwizzledSharedLayout",
    ):  # fmt: skip
        setattr(gl, name, anything)
    functions: dict[str, Any] = {
        "int32": torch.int32, "int64": torch.int64, "float32": torch.float32,
        "bfloat16": torch.bfloat16, "int8": torch.int8, "float8e4nv": torch.float8_e4m3fn,
        "constexpr": lambda x: x, "static_range": range,
        "program_id": lambda axis: value(machine.ids[axis]),
        "num_programs": lambda axis: value(machine.grid[axis]),
        "load": lambda p, mask=None, other=None: p.read(mask, other),
        "store": lambda p, x, mask=True: p.write(x, mask),
        "arange": lambda low, high, layout=None: value(torch.arange(low, high)),
        "zeros_like": torch.zeros_like,
        "zeros": lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)),
        "full": lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=dtype)),
        "minimum": lambda a, b: value(torch.minimum(torch.as_tensor(a), torch.as_tensor(b))),
        "maximum": lambda a, b: value(torch.maximum(torch.as_tensor(a), torch.as_tensor(b))),
        "where": lambda c, a, b: value(torch.where(c, a, b)),
        "exp": torch.exp, "exp2": torch.exp2,
        "permute": lambda x, order: x.permute(order),
        "max": lambda x, axis: x.amax(axis),
        "sum": lambda x, axis: x.sum(axis),
        "cdiv": lambda a, b: (a + b - 1) // b,
        "split": lambda x: x.unbind(-1),
        "join": lambda a, b: torch.stack((a, b), -1),
        "reshape": lambda x, shape: x.reshape(tuple(shape)),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "multiple_of": lambda x, n: x,
        "allocate_shared_memory": _allocated,
    }  # fmt: skip
    for name, function in functions.items():
        setattr(gl, name, function)
    return gl


@contextmanager
def _standing_for(modules: dict[str, ModuleType]) -> Iterator[None]:
    held = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in held.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def loaded(path: Path, *others: str, asm: Callable[..., Any] | None = None) -> ModuleType:
    """The kernels of a file, for the host. `others`: modules of its package that it imports kernel
    code from, in order. `asm`: what ``inline_asm_elementwise`` means."""
    machine = Machine()
    gluon = ModuleType("triton.experimental.gluon")
    jit = lambda body=None, **more: Kernel(body, machine) if body else jit  # noqa: E731
    copies, hopper = ModuleType("async_copy"), ModuleType("hopper")
    copies.__dict__.update(
        async_copy_global_to_shared=machine.copy,
        commit_group=machine.commit,
        wait_group=machine.wait_copies,
    )
    hopper.__dict__.update(
        fence_async_shared=lambda: None,
        warpgroup_mma=machine.multiply,
        warpgroup_mma_wait=machine.wait_products,
    )
    ampere = ModuleType("ampere")
    language = _language(machine)
    language.__dict__["inline_asm_elementwise"] = asm
    gluon.__dict__.update(jit=jit, language=language)
    ampere.__dict__.update(
        async_copy=copies, mma_v2=lambda a, b, add: add + a.to(add.dtype) @ b.to(add.dtype)
    )
    root = "triton.experimental.gluon"
    modules = {
        "triton": ModuleType("triton"), "triton.experimental": ModuleType("triton.experimental"),
        root: gluon, f"{root}.language": language,
        f"{root}.language.nvidia": ModuleType("nvidia"),
        f"{root}.language.nvidia.ampere": ampere, f"{root}.language.nvidia.hopper": hopper,
    }  # fmt: skip
    modules["triton.experimental"].__dict__["gluon"] = gluon
    names = {name: f"metainfer.ops.{path.parent.name}.{name}" for name in others}
    with _standing_for(modules | {full: ModuleType(full) for full in names.values()}):
        for name, full in names.items():
            sys.modules[full] = _executed(path.with_name(f"{name}.py"))
        return _executed(path)


def _executed(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_on_host", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["range"] = lambda *ends: map(value, range(*map(int, ends)))
    spec.loader.exec_module(module)
    return module
