"""Prepared launches: what they keep apart is judged by Triton's own binder, for a card of 9.0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from metainfer.ops.launch import Prepared, ceil_div, power_of_2, prepared


@triton.jit
def sample_kernel(x, w, bias, rows, stride, eps, flag, K: tl.constexpr, WIDE: tl.constexpr):
    tl.store(x, tl.load(w) + rows + stride + eps)


ROOM = torch.zeros(256, dtype=torch.uint8)
START = -ROOM.data_ptr() % 16
BINDER = create_function_from_signature(
    sample_kernel.signature, sample_kernel.params, make_backend(GPUTarget("cuda", 90, 32))
)


def tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    """One that begins `offset` bytes behind a multiple of 16."""
    begin = START + offset
    return ROOM[begin : begin + 64].view(dtype)


def descriptor(dtype: torch.dtype, block: int) -> TensorDescriptor:
    return TensorDescriptor(tensor(dtype, 0), [4, 4], [4, 1], [1, block])


TENSORS = st.builds(
    tensor, st.sampled_from((torch.float32, torch.bfloat16)), st.sampled_from((0, 4, 16))
)
WHOLE = st.sampled_from(
    (0, 1, 2, 16, 17, -16, 1 << 31, (1 << 31) + 1, 1 << 62, 1 << 63, -(1 << 31) - 1)
)
LAUNCHES = st.tuples(
    TENSORS,
    TENSORS
    | st.builds(descriptor, st.sampled_from((torch.float32, torch.int32)), st.sampled_from((2, 4))),
    TENSORS | st.none(),
    WHOLE,
    WHOLE | st.booleans(),
    st.sampled_from((1.0, 16.0)),
    st.booleans(),
    st.sampled_from((1, 16, True)),
    st.sampled_from((tl.float32, tl.bfloat16, None)),
)
Told = list[tuple[Any, ...]]


class Watched:
    """A prepared kernel on a driver of the test's: what went through Triton, and what did not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: Told = []
        self.launched: Told = []
        self.device = 0
        active = SimpleNamespace(
            get_current_device=lambda: self.device, get_current_stream=lambda device: 70 + device
        )
        monkeypatch.setattr(driver, "_active", active)
        monkeypatch.setattr(sample_kernel, "run", self._through_triton)
        self.kernel = prepared(sample_kernel)

    def _through_triton(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        number = len(self.compiled)
        self.compiled.append((grid, arguments, options))

        def run(*given: Any) -> None:
            self.launched.append((number, *given))

        return SimpleNamespace(function=f"f{number}", packed_metadata=f"m{number}", run=run)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def launch(**changed: Any) -> tuple[Any, ...]:
    usual = {
        "x": tensor(torch.float32, 0), "w": tensor(torch.float32, 16), "bias": None, "rows": 48,
        "stride": 1, "eps": 1e-6, "flag": False, "K": 128, "WIDE": tl.float32,
    }  # fmt: skip
    return tuple((usual | changed).values())


@settings(deadline=None, max_examples=100)
@given(one=LAUNCHES, other=LAUNCHES, place=st.integers(0, 8))
def test_what_triton_compiles_apart_is_kept_apart(
    one: tuple[Any, ...], other: tuple[Any, ...], place: int
) -> None:
    other = (*one[:place], other[place], *one[place + 1 :])
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        for arguments in (one, other):
            watched.kernel[(1,)](*arguments, num_warps=4)
        found = [BINDER(*arguments, debug=False)[1] for arguments in (one, other)]
        alike = [
            [(kind, str(more), type(more)) for kind, more in specialised] for specialised in found
        ]
        if alike[0] != alike[1]:
            assert len(watched.compiled) == 2


def test_a_launch_like_one_before_is_triton_s_own(watched: Watched) -> None:
    watched.kernel[(5, 2)](*launch(), num_warps=8)
    again = launch(x=tensor(torch.float32, 32), rows=160, eps=0.5)
    watched.kernel[(7,)](*again, num_warps=8)
    assert len(watched.compiled) == 1
    addresses = [each.data_ptr() for each in again[:2]]
    assert watched.launched == [
        (0, 7, 1, 1, 70, "f0", "m0", None, None, None, *addresses, *again[2:])
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"x": tensor(torch.float32, 4)}), ({}, {"bias": tensor(torch.float32, 0)}),
        ({}, {"w": tensor(torch.bfloat16, 16)}), ({}, {"rows": 47}), ({}, {"stride": 17}),
        ({}, {"rows": 1 << 31}), ({"rows": 1 << 62}, {"rows": 1 << 63}), ({}, {"rows": 48.0}),
        ({}, {"flag": 0}), ({}, {"K": 64}), ({}, {"WIDE": tl.bfloat16}),
        ({"w": descriptor(torch.float32, 4)}, {"w": descriptor(torch.float32, 2)}),
        ({"w": descriptor(torch.float32, 4)}, {"w": descriptor(torch.int32, 4)}),
    ],
)  # fmt: skip
def test_another_kind_of_launch_goes_through_triton_once(
    watched: Watched, before: dict[str, Any], after: dict[str, Any]
) -> None:
    for changed in (before, after, after, before):
        watched.kernel[(1, 2, 3)](*launch(**changed), num_warps=4)
    assert len(watched.compiled) == 2
    assert [each[:4] for each in watched.launched] == [(1, 1, 2, 3), (0, 1, 2, 3)]


def test_options_and_devices_have_kernels_of_their_own(watched: Watched) -> None:
    watched.kernel[(1,)](*launch(), num_warps=4)
    watched.kernel[(1,)](*launch(), num_warps=8)
    watched.device = 1
    for _ in range(2):
        watched.kernel[(1,)](*launch(), num_warps=4)
    assert len(watched.compiled) == 3
    assert [each[:6] for each in watched.launched] == [(2, 1, 1, 1, 71, "f2")]


def test_a_parameter_left_out_is_an_error(watched: Watched) -> None:
    with pytest.raises(ValueError, match="zip"):
        watched.kernel[(1,)](*launch()[:-1], num_warps=4)


def test_kernels_of_the_interpreter_stay_as_they_are() -> None:
    interpreted = object()
    assert prepared(interpreted) is interpreted
    assert isinstance(prepared(sample_kernel), Prepared)


@settings(max_examples=30)
@given(a=st.integers(0, 1 << 40), b=st.integers(1, 1 << 20))
def test_whole_numbers_of_the_host_are_triton_s(a: int, b: int) -> None:
    assert ceil_div(a, b) == triton.cdiv(a, b)
    assert power_of_2(max(a, 1)) == triton.next_power_of_2(max(a, 1))
