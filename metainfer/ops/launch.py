"""Launches of Triton kernels without the compiler's dispatch, once it has seen one like it.

For every launch Triton binds, types and specialises each argument anew, which is most of the host's
time for it. What a launch is specialised on fits into a short key; under it the compiled kernel is
kept, and launched as Triton would. The first launch of a key goes through Triton: it compiles,
refuses, and tells its compile hooks there. Hooks of launches are not called.

A key is made by a function written for the types of a launch's arguments, as Triton writes its own
binder: a loop over the arguments would take as long as what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

Form = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
"""From the arguments of a launch to its key, and to the same with addresses in place of tensors."""


def prepared(kernel: Any) -> Any:
    """`kernel`, launched as before: ``kernel[grid](*arguments, num_warps=...)``, every parameter by
    its place. The interpreter's kernels as they are."""
    return Prepared(kernel) if isinstance(kernel, JITFunction) else kernel


def ceil_div(a: int, b: int) -> int:
    """``triton.cdiv`` of the host, which goes through the compiler's constants there."""
    return -(-a // b)


def power_of_2(a: int) -> int:
    """The least power of two that is no less: ``triton.next_power_of_2`` of the host."""
    return 1 << (a - 1).bit_length()


class Prepared:
    """One kernel, and what Triton has compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._forms: dict[tuple[type, ...], Form] = {}
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
        kinds = tuple(map(type, arguments))
        form = self._forms.get(kinds)
        if form is None:
            fixed = [parameter.is_constexpr for parameter in self._kernel.params]
            form = self._forms[kinds] = _form(kinds, fixed)
        key, values = form(*arguments)
        active = driver.active
        device = active.get_current_device()
        key = (kinds, key, device, *options.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*arguments, **options)
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        function, packed = compiled.function, compiled.packed_metadata
        compiled.run(x, y, z, stream, function, packed, None, None, None, *values)


def _form(kinds: Sequence[type], fixed: Sequence[bool]) -> Form:
    """The form of arguments of these types; `fixed`: which are constants of the kernel.

    Triton compiles for a tensor's type and whether its address is a multiple of 16, and for whether
    a number is 1, a multiple of 16, and how wide it is. Mostly all are aligned and none is wide.
    """
    names = [f"a{place}" for place in range(len(kinds))]
    key, values, addresses, numbers = list[str](), list[str](), list[str](), list[str]()
    for name, kind, constant in zip(names, kinds, fixed, strict=True):
        values.append(name)
        if constant:
            key.append(name)
        elif issubclass(kind, Tensor):
            key.append(f"{name}.dtype")
            addresses.append(f"p{name} := {name}.data_ptr()")
            values[-1] = f"p{name}"
        elif kind is TensorDescriptor:
            key += [f"{name}.base.dtype", f"*{name}.block_shape"]
        elif kind is int:
            key += [f"{name} == 1", f"{name} & 15 == 0"]
            numbers.append(name)
        elif kind is not float:
            key.append(name)
    if addresses:
        held = [each.partition(" ")[0] for each in addresses]
        low = " | ".join(f"({each})" for each in addresses)
        key.append(f"({low}) & 15 and ({', '.join(f'{each} & 15 == 0' for each in held)},)")
    if numbers:
        widths = ", ".join(f"_width({each})" for each in numbers)
        key.append(f"({' | '.join(numbers)}) >> 31 and ({widths},)")
    source = f"lambda {', '.join(names)}: (({', '.join(key)},), ({', '.join(values)},))"
    found: Form = eval(source, {"_width": _width})
    return found


def _width(value: int) -> int:
    """32 bits, 64, or 64 without a sign."""
    return 0 if -(1 << 31) <= value < 1 << 31 else 1 if value < 1 << 63 else 2
