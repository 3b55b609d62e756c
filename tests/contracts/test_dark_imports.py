"""Starred modules import with torch, transformers and triton blocked, so they run without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from starred import HEAVY, STARRED, STARRED_ROOMS, is_named, is_starred
from tree import ROOT, modules, packages

BLOCKED = ("torch", "transformers", "triton", "diffusers", "flashinfer")

HOOK = """
import importlib, json, sys, traceback

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

BLOCKED = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Wall())
failures = {}
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module("metainfer." + name)
    except Exception:
        failures[name] = traceback.format_exc(limit=-3)
print(json.dumps(failures))
"""


def import_in_the_dark(names: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", HOOK, json.dumps(BLOCKED), json.dumps(names)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    failures = json.loads(done.stdout)
    assert isinstance(failures, dict)
    return failures


def test_every_starred_module_imports_without_them() -> None:
    names = [name for name in modules() if is_starred(name)]
    assert len(names) > 40
    failures = import_in_the_dark(names)
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


def test_the_wall_stands() -> None:
    assert set(import_in_the_dark(["ops.norm.ref", "core.step"])) == {"ops.norm.ref"}


def test_every_module_is_starred_or_named_as_heavy() -> None:
    new = [name for name in modules() if not is_named(name)]
    assert not new, f"say in starred.py whether these import without torch: {new}"


@pytest.mark.parametrize("room", STARRED_ROOMS)
def test_starred_rooms_exist(room: str) -> None:
    assert room in packages()


def test_mixed_rooms_are_listed_by_file_where_it_matters() -> None:
    # The planner reads these without torch; a catch-all must not swallow them.
    for name in ("formats.index", "models.dense.arch", "ops.norm.impls", "ops.catalog"):
        assert name in modules() and is_starred(name)
    assert not set(STARRED) & set(HEAVY)


@pytest.mark.parametrize(
    "module", ["formats.new", "models.dense.new", "ops.norm.new", "engine.new", "executor.new"]
)
def test_a_new_module_of_a_mixed_room_must_be_named(module: str) -> None:
    assert not is_named(module)


def test_a_new_module_of_a_starred_room_is_starred() -> None:
    assert is_starred("kernels.new") and is_starred("kv.book.new")
    assert not is_starred("kv.bookkeeping") and not is_starred("textual")
