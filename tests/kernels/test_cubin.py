"""NVRTC as it comes in a wheel: what it opens by name is loaded before it."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from metainfer.kernels import cubin


def test_a_wheels_builtins_are_loaded_before_its_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = tmp_path / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libother.so"):
        (lib / name).touch()
    loaded: list[str] = []

    def load(name: str) -> str:
        if not Path(name).is_absolute():
            raise OSError("not on the library path")
        loaded.append(Path(name).name)
        return name

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: "libnvrtc.so.12")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.chdir(lib)  # nothing is taken from where one happens to be
    assert str(cubin._nvrtc()) == str(lib / "libnvrtc.so.13")
    assert loaded == ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RuntimeError, match="neither nvcc nor NVRTC"):
        cubin._nvrtc()
