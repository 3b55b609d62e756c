"""Shared by the tests of the C kernels: builds, seeds, poisoned outputs, thread counts."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from metainfer.kernels import native

#: Every way the sources can be compiled: for this CPU, and in the compiler's own vectors.
BUILDS = [(), ("MI_PORTABLE",)]

needs_compiler = pytest.mark.skipif(
    not native.probe_compiler().accepted, reason="no C compiler on this machine"
)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN, so an element that a kernel forgets shows."""
    empty = torch.empty

    def nan_filled(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", nan_filled)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
