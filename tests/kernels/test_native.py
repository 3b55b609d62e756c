"""Compile and load: cached by content, safe for two processes at once, refusals with reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metainfer.kernels import native

needs_compiler = pytest.mark.skipif(
    not native.probe_compiler().accepted, reason="no C compiler on this machine"
)

ANSWER = '#include "value.h"\nint answer(void) { return VALUE; }\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
