"""Public surfaces are frozen: adding to one is an edit here, in the same commit."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from tree import PACKAGE, ROOT, public_names, source_files

from metainfer.core import env
from metainfer.platform.base import API_VERSION, MEMBERS
from metainfer.platform.discovery import GROUP

ENVIRONMENT = [
    "METAINFER_CACHE",
    "METAINFER_PLATFORM",
    "METAINFER_API_KEY",
    "METAINFER_ADMIN_KEY",
    "METAINFER_LOG",
]

#: Modules that code outside this tree builds on, with every name they offer.
EXPORTS: dict[str, list[str]] = json.loads(
    (ROOT / "tests" / "contracts" / "exports.json").read_text()
)


def test_environment_names() -> None:
    assert [variable.name for variable in env.VARIABLES] == ENVIRONMENT
    assert all(variable.effect for variable in env.VARIABLES)


def test_no_name_of_ours_is_read_outside_the_table() -> None:
    foreign = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in source_files(".py")
        if path.is_relative_to(PACKAGE)
        for name in re.findall(r"\bMETAINFER_[A-Z][A-Z_]*", path.read_text())
        if name not in ENVIRONMENT
    }
    assert not foreign


@pytest.mark.parametrize("module", sorted(EXPORTS))
def test_exports(module: str) -> None:
    assert public_names(module) == EXPORTS[module]


def test_the_vendor_interface() -> None:
    assert API_VERSION == 0 and GROUP == "metainfer.platforms"
    assert len(MEMBERS) == len(set(MEMBERS)) == 16


def test_commands_and_entry_points() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"metainfer": "metainfer.cli.main:main"}
    assert "entry-points" not in project  # built-in platforms are not plug-ins


def test_the_package_itself_offers_its_version() -> None:
    assert public_names("__init__") == []
    assert "__version__" in (PACKAGE / "__init__.py").read_text()
