"""Compile one C file of this package and load it, once per machine.

The shared library lands in ``native`` of the cache folder (`core.env.cache_dir`) under a name
hashed from everything that can change its code: the source with the headers it includes, the
compiler's version, the flags and this CPU's features. Two processes may build at once: each
writes its own temporary file and renames it into place.

Probing never raises: a missing compiler or a failing build is a `Verdict` with a reason.
Every library that exports ``mi_set_runner`` is handed the process's one thread pool (``pool.c``).
Imports without torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from metainfer.core.env import cache_dir
from metainfer.core.errors import UserError
from metainfer.core.verdict import ACCEPT, Verdict, reject

CANDIDATES = ("cc", "gcc", "clang")
POOL = Path(__file__).with_name("pool.c")
BASE_FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread"),
    *("-fno-math-errno", "-Wno-psabi"),
)
TIMEOUT_S = 120.0

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


class NativeError(UserError):
    """A C kernel cannot be built or loaded here; `verdict` says why."""

    default_code = "native_build"

    def __init__(self, verdict: Verdict) -> None:
        message = "; ".join(reason.message for reason in verdict.reasons)
        super().__init__(message, "Install gcc or clang, or choose another implementation.")
        self.verdict = verdict


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler that has produced a loadable library here.

    `flags`: how it is told to target this CPU.
    """

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]


def cpu_features() -> frozenset[str]:
    """Feature words of the first CPU as Linux names them (``avx512f``, ``asimd`` ...).

    Empty where ``/proc/cpuinfo`` does not exist; nothing in the kernels depends on it but the
    cache key and what `doctor` shows.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return frozenset()


def simd_level() -> str:
    """The widest path that the C sources have for this CPU: avx512, avx2, neon or scalar."""
    features = cpu_features()
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= features:
        return "avx512"
    if {"avx2", "fma", "f16c"} <= features:
        return "avx2"
    return "neon" if "asimd" in features or platform.machine() == "arm64" else "scalar"


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and combined output; a command that cannot start counts as failed."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout


def _error_line(output: str) -> str:
    """The first line that names an error, else the first line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if "error:" in line.lower()]
    return (named or lines or ["no output"])[0][:300]


def _accepted_flags(command: tuple[str, ...]) -> tuple[str, ...] | None:
    """The first flag set with which `command` builds a trivial library; None if none."""
    targets = (("-march=native",), ("-mcpu=native",), ())
    with tempfile.TemporaryDirectory(prefix="metainfer-cc-") as folder:
        source = Path(folder, "probe.c")
        source.write_text("int probe(int x) { return x + 1; }\n", encoding="ascii")
        for flags in targets:
            out = str(Path(folder, "probe.so"))
            if _run([*command, *BASE_FLAGS, *flags, str(source), "-o", out, "-lm"])[0] == 0:
                return flags
    return None


@functools.cache
def _find_compiler(cc: str, path: str) -> tuple[Compiler | None, Verdict]:
    wanted = [tuple(shlex.split(cc))] if cc.strip() else [(name,) for name in CANDIDATES]
    tried: list[str] = []
    for command in wanted:
        found = shutil.which(command[0], path=path or None)
        if found is None:
            tried.append(f"{command[0]}: not found")
            continue
        command = (found, *command[1:])
        status, version = _run([*command, "--version"])
        if status != 0:
            tried.append(f"{command[0]}: {_error_line(version)}")
            continue
        flags = _accepted_flags(command)
        if flags is None:
            tried.append(f"{command[0]}: cannot build a shared library")
            continue
        return Compiler(command, version.splitlines()[0].strip(), flags), ACCEPT
    return None, reject("compiler", "no working C compiler: " + "; ".join(tried), tried=tried)


def find_compiler() -> Compiler | None:
    """The C compiler in use: ``$CC`` if set, else the first working one of cc, gcc, clang."""
    return _find_compiler(os.environ.get("CC", ""), os.environ.get("PATH", ""))[0]


def probe_compiler() -> Verdict:
    """`ACCEPT` when C can be compiled here, else why not. Never raises."""
    return _find_compiler(os.environ.get("CC", ""), os.environ.get("PATH", ""))[1]


def cache_folder() -> Path:
    """Where built libraries are kept."""
    return cache_dir() / "native"


def _sources(source: Path) -> list[Path]:
    """`source` and the local headers it includes, each once, in order of first mention."""
    seen: list[Path] = []
    todo = [source.resolve()]
    while todo:
        file = todo.pop(0)
        if file in seen:
            continue
        seen.append(file)
        text = file.read_text(encoding="utf-8")
        todo += [(file.parent / name).resolve() for name in _INCLUDE.findall(text)]
    return seen


def _library_path(source: Path, compiler: Compiler, flags: tuple[str, ...]) -> Path:
    digest = hashlib.sha256()
    for part in (
        *(file.read_bytes() for file in _sources(source)),
        "\0".join((*compiler.command, compiler.version, *flags)).encode(),
        " ".join((platform.machine(), *sorted(cpu_features()))).encode(),
    ):
        digest.update(hashlib.sha256(part).digest())
    return cache_folder() / f"{source.stem}-{digest.hexdigest()[:24]}.so"


def _build(source: Path, compiler: Compiler, flags: tuple[str, ...], target: Path) -> Verdict:
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".tmp", prefix=source.stem, dir=target.parent)
        os.close(handle)
    except OSError as error:
        return reject("native-cache", f"cannot write {target.parent}: {error.strerror}")
    try:
        status, output = _run([*compiler.command, *flags, str(source), "-o", temporary, "-lm"])
        if status != 0:
            line = _error_line(output)
            return reject("native-build", f"{source.name} does not compile: {line}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return ACCEPT


def _open(target: Path) -> tuple[ctypes.CDLL | None, Verdict]:
    try:
        return ctypes.CDLL(str(target)), ACCEPT
    except OSError as error:
        return None, reject("native-load", f"cannot load {target.name}: {error}")


@functools.cache
def _load(
    source: Path, defines: tuple[str, ...], cc: str, folder: str
) -> tuple[ctypes.CDLL | None, Verdict]:
    compiler, verdict = _find_compiler(cc, os.environ.get("PATH", ""))
    if compiler is None:
        return None, verdict
    flags = (*BASE_FLAGS, *compiler.flags, *(f"-D{name}" for name in defines))
    try:
        target = _library_path(source, compiler, flags)
    except OSError as error:
        return None, reject("native-build", f"cannot read {error.filename}: {error.strerror}")
    if target.exists():
        library, verdict = _open(target)
        if library is not None:
            return library, verdict
    verdict = _build(source, compiler, flags, target)
    return _open(target) if verdict.accepted else (None, verdict)


def _share_pool(library: ctypes.CDLL, cc: str, folder: str) -> Verdict:
    """Hands the pool to a library that wants it."""
    if not hasattr(library, "mi_set_runner"):
        return ACCEPT
    pool, verdict = _load(POOL, (), cc, folder)
    if pool is not None:
        library.mi_set_runner(ctypes.cast(pool.mi_pool_run, ctypes.c_void_p))
    return verdict


def try_load(source: Path, *, defines: tuple[str, ...] = ()) -> tuple[ctypes.CDLL | None, Verdict]:
    """The library of `source`, built if it is not in the cache, with the verdict. Never raises.

    `defines` become ``-D`` flags, so each set is a library of its own. The answer is remembered
    for the life of the process.
    """
    cc, folder = os.environ.get("CC", ""), str(cache_folder())
    library, verdict = _load(source, defines, cc, folder)
    if library is not None:
        verdict = _share_pool(library, cc, folder)
    return (library if verdict.accepted else None), verdict


def load(source: Path, *, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """As `try_load`; raises `NativeError` with the reason when there is no library."""
    library, verdict = try_load(source, defines=defines)
    if library is None:
        raise NativeError(verdict)
    return library
