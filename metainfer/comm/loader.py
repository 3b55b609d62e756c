"""``kernels.cu`` to a cubin, once per machine: nvcc where there is one, else NVRTC.

A cubin lies in the cache folder under a hash of sources, target, variant and compiler. Nothing here
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

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "kernels.cu"
HEADERS = tuple(FOLDER / name for name in ("collective.h", "slab.h", "ptx.h"))
FLAGS = ("-O3", "-std=c++17")
TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation: ranks, type code (`layout.TYPES` or `layout.BYTES`), epilogue or not."""

    world: int
    type: int
    rows: bool = False

    @property
    def defines(self) -> tuple[str, ...]:
        plain = () if self.rows else ("-DMI_PLAIN",)
        return (f"-DMI_N={self.world}", f"-DMI_TYPE={self.type}", *plain)


def find_nvcc() -> str | None:
    """nvcc on the path, or in the usual place."""
    found = shutil.which("nvcc")
    usual = Path("/usr/local/cuda/bin/nvcc")
    return found or (str(usual) if usual.exists() else None)


def build(variant: Variant, arch: str) -> tuple[bytes | None, Verdict, str]:
    """The cubin for `arch` (``sm_90``), the verdict, and the compiler's words. Never raises."""
    nvcc = find_nvcc()
    version = _version(nvcc) if nvcc else "nvrtc"
    target = _target(variant, arch, version)
    try:
        return target.read_bytes(), ACCEPT, "cached"
    except OSError:
        pass
    try:
        body, log = _by_nvcc(nvcc, variant, arch) if nvcc else _by_nvrtc(variant, arch)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        text = str(error)[:600]
        return None, reject("compiler", f"kernels.cu does not compile for {arch}: {text}"), text
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".cubin-")
        with os.fdopen(handle, "wb") as out:
            out.write(body)
        os.replace(temporary, target)
    except OSError:
        pass  # not kept: the next start compiles again
    return body, ACCEPT, log


def _target(variant: Variant, arch: str, version: str) -> Path:
    digest = hashlib.sha256()
    for part in (*(file.read_bytes() for file in (SOURCE, *HEADERS)), repr(variant).encode()):
        digest.update(hashlib.sha256(part).digest())
    digest.update("\0".join((arch, version, *FLAGS)).encode())
    return cache_dir() / "native" / f"comm-{arch}-{digest.hexdigest()[:24]}.cubin"


def _version(nvcc: str) -> str:
    try:
        done = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return "nvcc"
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "nvcc"


def _by_nvcc(nvcc: str, variant: Variant, arch: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory(prefix="metainfer-cu-") as folder:
        out = Path(folder, "kernels.cubin")
        command = [nvcc, "-cubin", f"-arch={arch}", *FLAGS, *variant.defines, "-Xptxas", "-v"]
        done = subprocess.run(
            [*command, str(SOURCE), "-o", str(out)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        log = done.stderr + done.stdout
        if done.returncode:
            raise RuntimeError(log)
        return out.read_bytes(), log


def _by_nvrtc(variant: Variant, arch: str) -> tuple[bytes, str]:
    library = _nvrtc()
    program = ctypes.c_void_p()
    names = [header.name.encode() for header in HEADERS]
    texts = [header.read_bytes() for header in HEADERS]
    status = library.nvrtcCreateProgram(
        ctypes.byref(program),
        SOURCE.read_bytes(),
        SOURCE.name.encode(),
        len(HEADERS),
        (ctypes.c_char_p * len(texts))(*texts),
        (ctypes.c_char_p * len(names))(*names),
    )
    if status:
        raise RuntimeError(f"nvrtcCreateProgram gives {status}")
    options = [f"--gpu-architecture={arch}", "--std=c++17", *variant.defines]
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
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("neither nvcc nor NVRTC was found")
