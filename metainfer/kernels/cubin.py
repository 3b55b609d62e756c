"""A CUDA source to a cubin, once per machine: nvcc where there is one, else NVRTC.

A cubin lies in the cache folder under a hash of sources, target, defines and compiler. Nothing here
starts the CUDA driver, so it also serves the compile audit on machines without a card.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from metainfer.core.env import cache_dir
from metainfer.core.verdict import ACCEPT, Verdict, reject

FLAGS = ("-O3", "-std=c++17")
TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Source:
    """A file, the headers beside it that it includes, and one set of ``-D`` flags. `name`: of its
    cubins in the cache."""

    name: str
    file: Path
    headers: tuple[Path, ...] = ()
    defines: tuple[str, ...] = ()

    def digest(self) -> str:
        """Changes with every byte that is compiled."""
        found = hashlib.sha256()
        files = (self.file, *self.headers)
        for part in (*(file.read_bytes() for file in files), repr(self.defines).encode()):
            found.update(hashlib.sha256(part).digest())
        return found.hexdigest()


def find_nvcc() -> str | None:
    """nvcc on the path, or in the usual place."""
    found = shutil.which("nvcc")
    usual = Path("/usr/local/cuda/bin/nvcc")
    return found or (str(usual) if usual.exists() else None)


def build(source: Source, arch: str) -> tuple[bytes | None, Verdict, str]:
    """The cubin for `arch` (``sm_90``, ``sm_120a``), the verdict, the compiler's words. Never
    raises."""
    nvcc = find_nvcc()
    version = compiler_version(nvcc) if nvcc else "nvrtc"
    target = _target(source, arch, version)
    try:
        return target.read_bytes(), ACCEPT, "cached"
    except OSError:
        pass
    try:
        body, log = _by_nvcc(nvcc, source, arch) if nvcc else _by_nvrtc(source, arch)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        text = str(error)[:600]
        said = f"{source.file.name} does not compile for {arch}: {text}"
        return None, reject("compiler", said), text
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".cubin-")
        with os.fdopen(handle, "wb") as out:
            out.write(body)
        os.replace(temporary, target)
    except OSError:
        pass  # not kept: the next start compiles again
    return body, ACCEPT, log


def _target(source: Source, arch: str, version: str) -> Path:
    said = "\0".join((source.digest(), arch, version, *FLAGS))
    digest = hashlib.sha256(said.encode()).hexdigest()[:24]
    return cache_dir() / "native" / f"{source.name}-{arch}-{digest}.cubin"


def compiler_version(nvcc: str) -> str:
    """The last line of its ``--version``."""
    try:
        done = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return "nvcc"
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "nvcc"


def _by_nvcc(nvcc: str, source: Source, arch: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory(prefix="metainfer-cu-") as folder:
        out = Path(folder, "kernels.cubin")
        command = [nvcc, "-cubin", f"-arch={arch}", *FLAGS, *source.defines, "-Xptxas", "-v"]
        done = subprocess.run(
            [*command, str(source.file), "-o", str(out)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        log = done.stderr + done.stdout
        if done.returncode:
            raise RuntimeError(log)
        return out.read_bytes(), log


def _by_nvrtc(source: Source, arch: str) -> tuple[bytes, str]:
    library = _nvrtc()
    program = ctypes.c_void_p()
    names = [header.name.encode() for header in source.headers]
    texts = [header.read_bytes() for header in source.headers]
    status = library.nvrtcCreateProgram(
        ctypes.byref(program),
        source.file.read_bytes(),
        source.file.name.encode(),
        len(source.headers),
        (ctypes.c_char_p * len(texts))(*texts),
        (ctypes.c_char_p * len(names))(*names),
    )
    if status:
        raise RuntimeError(f"nvrtcCreateProgram gives {status}")
    options = [f"--gpu-architecture={arch}", "--std=c++17", *source.defines]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = library.nvrtcCompileProgram(program, len(options), given)
    log = _read(library, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
    if status:
        raise RuntimeError(log.decode("utf-8", "replace"))
    body = _read(library, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return body, log.rstrip(b"\0").decode("utf-8", "replace")


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, size: str, body: str) -> bytes:
    length = ctypes.c_size_t()
    if getattr(library, size)(program, ctypes.byref(length)):
        raise RuntimeError(f"{size} failed")
    buffer = ctypes.create_string_buffer(length.value)
    if getattr(library, body)(program, buffer):
        raise RuntimeError(f"{body} failed")
    return buffer.raw


def _nvrtc() -> ctypes.CDLL:
    """NVRTC on the library path, or from the wheel that torch's CUDA builds bring.

    Raises:
        RuntimeError: neither is there.
    """
    names = [ctypes.util.find_library("nvrtc")]
    for folder in sys.path:
        names += [str(path) for path in sorted(Path(folder).glob("nvidia/*/lib/libnvrtc.so*"))]
    for name in names:
        if name is None:
            continue
        try:
            if os.path.isabs(name):  # a wheel's, where no loader finds what NVRTC opens by name
                for part in sorted(Path(name).parent.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(part))
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("neither nvcc nor NVRTC was found")
