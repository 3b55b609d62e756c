"""Launches through the driver: what it is told, by a driver that is not there."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from metainfer.kernels import driver


class Library:
    """Notes launches; a config is read while it is alive."""

    def __init__(self) -> None:
        self.plain: list[tuple[Any, ...]] = []
        self.early: list[tuple[Any, ...]] = []

    def cuLaunchKernel(self, handle: Any, *given: Any) -> int:
        self.plain.append((handle.value, *given[:7], given[7].value))
        return 0

    def cuLaunchKernelEx(self, config: Any, handle: Any, *_: Any) -> int:
        launch = config._obj
        found = [launch.attributes[i] for i in range(launch.count)]
        attributes = [(each.id, each.value[0]) for each in found]
        sizes = (*launch.grid, *launch.block, launch.shared)
        self.early.append((handle.value, *sizes, launch.stream, attributes))
        return 0


def test_an_early_launch_is_the_same_one_and_says_that_it_may_come_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library()
    monkeypatch.setattr(driver, "library", lambda: library)
    kernel, value = driver.Function(ctypes.c_void_p(7)), ctypes.c_uint32(1)
    kernel(3, 128, 9, [value], shared=64)
    kernel(3, 128, 9, [value], shared=64, early=True)
    launched = (7, 3, 1, 1, 128, 1, 1, 64, 9)
    assert library.plain == [launched]
    # 6: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h
    assert library.early == [(*launched, [(6, 1)])]


def test_structures_are_as_large_as_the_driver_s() -> None:
    """CUlaunchConfig and CUlaunchAttribute of cuda.h, and where the pointers are in the first."""
    assert (ctypes.sizeof(driver._Launch), ctypes.sizeof(driver._Attribute)) == (56, 72)
    places = (driver._Launch.stream, driver._Launch.attributes, driver._Launch.count)
    assert [place.offset for place in places] == [32, 40, 48]
