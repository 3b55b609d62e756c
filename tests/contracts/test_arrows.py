"""Imports point down: the contracts of `.importlinter` hold, and cover every room."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starred import STARRED_ROOMS
from tree import PACKAGE, ROOT

LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]


#: Torch-free at import by `test_dark_imports`; they may reach torch through the engine, on use.
ABOVE_THE_ENGINE = {"doctor", "server", "cli"}


def lint(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LINT, "--no-cache", "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def contracts() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser


def layered() -> list[set[str]]:
    """Rooms per layer, highest first."""
    text = contracts()["importlinter:contract:layers"]["layers"]
    return [set(re.findall(r"metainfer\.([\w.]+)", line)) for line in text.split("\n") if line]


def rooms() -> set[str]:
    """Packages that hold modules; ``kv`` is a folder of two rooms."""
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} - {"kv"}
    return found | {"kv.book", "kv.store"}


def test_the_arrows_hold() -> None:
    done = lint(ROOT / ".importlinter")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_has_its_layer() -> None:
    placed = set().union(*layered())
    assert not rooms() - placed, "give the new room a line in .importlinter"


def test_the_order_is_that_of_the_house() -> None:
    height = {room: -index for index, names in enumerate(layered()) for room in names}
    for above, below in (
        ("cli", "server"),
        ("server", "engine"),
        ("doctor", "engine"),
        ("engine", "executor"),
        ("engine", "scheduler"),
        ("executor", "models"),
        ("planner", "models"),
        ("models", "ops"),
        ("comm", "ops"),
        ("ops", "kernels"),
        ("ops", "formats"),
        ("kv.store", "kv.book"),
        ("kv.store", "formats"),
        ("kernels", "platform"),
        ("platform", "core"),
        ("workers", "core"),
        ("text", "core"),
    ):
        assert height[above] > height[below], (above, below)


def test_starred_rooms_are_forbidden_torch() -> None:
    section = contracts()["importlinter:contract:pure"]
    sources = set(re.findall(r"metainfer\.([\w.]+)", section["source_modules"]))
    assert sources >= set(STARRED_ROOMS) - ABOVE_THE_ENGINE
    assert {"torch", "transformers", "triton"} <= set(section["forbidden_modules"].split())


@pytest.mark.parametrize(
    ("layers", "broken"),
    [
        (("metainfer.core", "metainfer.platform"), True),
        (("metainfer.platform", "metainfer.core"), False),
    ],
)
def test_a_wrong_arrow_is_seen(tmp_path: Path, layers: tuple[str, str], broken: bool) -> None:
    config = tmp_path / "contracts"
    config.write_text(
        "[importlinter]\nroot_package = metainfer\n[importlinter:contract:one]\nname = one\n"
        f"type = layers\nlayers =\n    {layers[0]}\n    {layers[1]}\n"
    )
    assert (lint(config).returncode != 0) is broken
