"""B-30: a kernel that is compiled after ready is told, by name and with its seconds."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from metainfer.kernels.compiles import CompileWatch


def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Triton calls around a compilation (its `knobs`, 3.6 to 3.9)."""
    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    triton = SimpleNamespace(knobs=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "triton", triton)  # type: ignore[arg-type]
    return runtime


def compile_one(runtime: Any, name: str) -> None:
    info = {"key": name, "repr": f"{name}[num_warps=4](x: *bf16)", "fn": SimpleNamespace(name=name)}
    if runtime.jit_cache_hook is not None and runtime.jit_cache_hook(**info):
        return
    if runtime.jit_post_compile_hook is not None:
        runtime.jit_post_compile_hook(**info)


def test_b30_a_late_compilation_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, told = hooks(monkeypatch), list[str]()
    watch = CompileWatch(told.append)
    compile_one(runtime, "during_warm_up")
    watch.open()
    compile_one(runtime, "late")
    watch.close()
    compile_one(runtime, "after_the_end")
    assert watch.count == 1 and len(told) == 1
    assert told[0].startswith("kernel late was compiled after ready in 0.")
    assert told[0].endswith("s: late[num_warps=4](x: *bf16)")


def test_hooks_of_others_are_called_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, seen = hooks(monkeypatch), list[str]()
    runtime.jit_cache_hook = lambda **info: seen.append(f"before {info['key']}")
    runtime.jit_post_compile_hook = lambda **info: seen.append(f"after {info['key']}")
    watch = CompileWatch(lambda text: None)
    watch.open()
    compile_one(runtime, "k")
    assert seen == ["before k", "after k"] and watch.count == 1


def test_where_triton_is_not_loaded_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    watch = CompileWatch(lambda text: None)
    watch.open()
    watch.close()
    assert watch.count == 0


def test_the_installed_triton_has_the_hooks() -> None:
    triton = pytest.importorskip("triton")
    assert hasattr(triton.knobs.runtime, "jit_cache_hook")
    assert hasattr(triton.knobs.runtime, "jit_post_compile_hook")
