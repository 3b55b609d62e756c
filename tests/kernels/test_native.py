"""Compile and load: cached by content, safe for two processes at once, refusals with reasons."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metainfer.kernels import native

needs_compiler = pytest.mark.skipif(
    not native.probe_compiler().accepted, reason="no C compiler on this machine"
)

ANSWER = '#include "value.h"\nint answer(void) { return VALUE; }\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path / "cache"))
    native._load.cache_clear()
    yield
    native._load.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "value.h").write_text("#ifndef VALUE\n#define VALUE 41\n#endif\n")
    path = tmp_path / "answer.c"
    path.write_text(ANSWER)
    return path


def libraries() -> list[str]:
    return sorted(os.listdir(native.cache_folder()))


@needs_compiler
def test_builds_once_and_again_when_a_header_changes(source: Path) -> None:
    assert native.load(source).answer() == 41
    first = libraries()
    assert len(first) == 1 and first[0].startswith("answer-") and first[0].endswith(".so")
    stamp = (native.cache_folder() / first[0]).stat().st_mtime_ns
    native._load.cache_clear()
    native.load(source)
    assert (native.cache_folder() / first[0]).stat().st_mtime_ns == stamp
    (source.parent / "value.h").write_text("#define VALUE 42\n")
    native._load.cache_clear()
    assert native.load(source).answer() == 42
    assert len(libraries()) == 2


@needs_compiler
def test_defines_are_part_of_the_key(source: Path) -> None:
    assert native.load(source, defines=("VALUE=7",)).answer() == 7
    assert native.load(source).answer() == 41


@needs_compiler
def test_cpu_features_are_part_of_the_key(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory shared by two machines must not hand AVX-512 code to the lesser one."""
    native.load(source)
    monkeypatch.setattr(native, "cpu_features", lambda: frozenset({"other"}))
    native._load.cache_clear()
    native.load(source)
    assert len(libraries()) == 2


@needs_compiler
def test_a_broken_library_in_the_cache_is_rebuilt(source: Path) -> None:
    native.load(source)
    path = native.cache_folder() / libraries()[0]
    path.unlink()
    path.write_bytes(b"not a library")
    native._load.cache_clear()
    assert native.load(source).answer() == 41


@needs_compiler
def test_a_compile_error_is_a_reason_with_its_first_line(source: Path) -> None:
    source.write_text("int answer(void) { return nothing; }\n")
    library, verdict = native.try_load(source)
    assert library is None
    assert verdict.reasons[0].code == "native-build"
    assert "answer.c" in verdict.reasons[0].message and "nothing" in verdict.reasons[0].message
    assert libraries() == []
    with pytest.raises(native.NativeError, match="nothing") as caught:
        native.load(source)
    assert caught.value.verdict == verdict


def test_a_missing_source_is_a_reason(tmp_path: Path) -> None:
    library, verdict = native.try_load(tmp_path / "absent.c")
    assert library is None and not verdict.accepted


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_reason(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    library, verdict = native.try_load(source)
    assert library is None and verdict.reasons[0].code == "native-cache"


def test_no_compiler_is_a_reason(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert native.find_compiler() is None
    verdict = native.probe_compiler()
    assert verdict.reasons[0].code == "compiler"
    assert "no-such-compiler: not found" in verdict.reasons[0].message
    assert native.try_load(source) == (None, verdict)
    monkeypatch.setenv("CC", "false")
    assert not native.probe_compiler().accepted
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "cc: not found" in native.probe_compiler().reasons[0].message


@needs_compiler
def test_arguments_in_cc_are_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = native.find_compiler()
    assert compiler is not None
    monkeypatch.setenv("CC", f"{compiler.command[0]} -DVALUE=9")
    assert native.load(source).answer() == 9


@needs_compiler
def test_two_processes_build_at_once(source: Path) -> None:
    code = (
        "import sys, pathlib; from metainfer.kernels import native;"
        "print(native.load(pathlib.Path(sys.argv[1])).answer(), 'torch' in sys.modules)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    assert [process.communicate()[0].split() for process in running] == [[b"41", b"False"]] * 4
    assert len(libraries()) == 1


def test_simd_level_reads_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    for features, level in (
        (avx512 | {"avx2", "fma", "f16c"}, "avx512"),
        ({"avx2", "fma", "f16c", "avx512f"}, "avx2"),
        ({"asimd"}, "neon"),
        ({"sse2"}, "scalar"),
    ):
        monkeypatch.setattr(native, "cpu_features", lambda found=features: frozenset(found))
        monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
        assert native.simd_level() == level


POOLED = """
#include <stdint.h>
#include <unistd.h>
typedef void (*task)(void *, int, int);
static void (*run)(task, void *, int, int);
void mi_set_runner(void (*runner)(task, void *, int, int)) { run = runner; }
static int slow;
static void count(void *seen, int part, int parts) {
    if (slow) usleep(2000);
    if (parts > 0) __atomic_add_fetch((int *)seen + part, 1, __ATOMIC_RELAXED);
}
static void nest(void *seen, int part, int parts) {
    (void)part, (void)parts;
    run(count, seen, 5, 2);
}
void go(int *seen, int parts, int threads, int wait) {
    slow = wait;
    run(count, seen, parts, threads);
}
void nested(int *seen, int parts, int threads) { run(nest, seen, parts, threads); }
"""


@pytest.fixture
def pooled(tmp_path: Path) -> ctypes.CDLL:
    path = tmp_path / "pooled.c"
    path.write_text(POOLED)
    return native.load(path)


def counts(library: ctypes.CDLL, parts: int, threads: int, wait: int = 0) -> list[int]:
    seen = (ctypes.c_int * parts)()
    library.go(seen, parts, threads, wait)
    return list(seen)


@needs_compiler
def test_pool_runs_every_part_once(pooled: ctypes.CDLL) -> None:
    for threads in (1, 2, 3, 9, 2):
        for parts in (0, 1, 2, 7, 64):
            for _ in range(50):
                assert counts(pooled, parts, threads) == [1] * parts
    assert counts(pooled, 6, 3, wait=1) == [1] * 6  # workers asleep between, parts that wait


@needs_compiler
def test_pool_serves_callers_at_once_and_nested_ones(pooled: ctypes.CDLL) -> None:
    with ThreadPoolExecutor(4) as callers:
        done = list(callers.map(lambda i: counts(pooled, 1 + i % 9, 3), range(400)))
    assert done == [[1] * (1 + i % 9) for i in range(400)]
    seen = (ctypes.c_int * 5)()
    pooled.nested(seen, 8, 3)
    assert list(seen) == [8] * 5


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_pool_works_in_a_forked_child(pooled: ctypes.CDLL) -> None:
    assert counts(pooled, 8, 3) == [1] * 8
    child = os.fork()
    if child == 0:
        right = counts(pooled, 8, 3, wait=1) == [1] * 8
        tasks = Path("/proc/self/task")
        helped = not tasks.exists() or len(list(tasks.iterdir())) == 3  # workers of its own
        os._exit(0 if right and helped else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert counts(pooled, 8, 3) == [1] * 8


@needs_compiler
def test_a_library_without_its_pool_is_refused(
    pooled: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it would run on one thread, a silent slow path."""
    monkeypatch.setattr(native, "POOL", tmp_path / "absent.c")
    library, verdict = native.try_load(tmp_path / "pooled.c")
    assert library is None and "absent.c" in verdict.reasons[0].message
