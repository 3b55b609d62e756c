"""Installs packages into a folder without a network: copies the code, writes the metadata."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from metainfer.platform.discovery import GROUP

FAKE = Path(__file__).parents[1] / "fake_platform"


def install(package: Path, target: Path) -> Path:
    """What ``pip install --no-deps --target`` leaves behind: packages and a dist-info folder."""
    project = tomllib.loads((package / "pyproject.toml").read_text())
    for name in project["tool"]["setuptools"]["packages"]:
        shutil.copytree(package / name, target / name, dirs_exist_ok=True)
    about = project["project"]
    write_metadata(target, about["name"], about["version"], about["entry-points"][GROUP])
    return target


def write_metadata(target: Path, name: str, version: str, points: dict[str, str]) -> None:
    info = target / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "\n".join(f"{key} = {value}" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")


def install_code(target: Path, module: str, code: str, points: dict[str, str]) -> Path:
    """A package of one module, for plug-ins that misbehave."""
    target.mkdir(parents=True, exist_ok=True)
    (target / f"{module}.py").write_text(code)
    write_metadata(target, module, "1.0", points)
    return target
