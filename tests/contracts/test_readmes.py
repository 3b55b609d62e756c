"""A room's README lists its files, one line each, and nothing that is gone.

A file is listed by its name, its path below the README or a pattern, in backticks: in the README
of its own folder or, for folders that follow a scheme (``ops/<op>``), in one above.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from tree import PACKAGE

SUFFIXES = (".py", ".c", ".h", ".cu", ".toml", ".html")
_NAMED = re.compile(r"`([\w./*<>-]+\.\w+)`")
_LINE = re.compile(r"^[-*] `([\w./-]+\.(?:py|c|h|cu|toml|html|md))`", re.MULTILINE)


def readmes(folder: Path) -> list[Path]:
    """README files from `folder` up to the package, nearest first."""
    chain = [folder, *folder.parents]
    inside = chain[: chain.index(PACKAGE) + 1]
    return [path for parent in inside if (path := parent / "README.md").exists()]


def is_listed(file: Path) -> bool:
    for readme in readmes(file.parent):
        below = file.relative_to(readme.parent).as_posix()
        for name in _NAMED.findall(readme.read_text()):
            if fnmatchcase(below, name) or fnmatchcase(file.name, name):
                return True
    return False


def files() -> list[Path]:
    return sorted(
        path
        for path in PACKAGE.rglob("*")
        if path.suffix in SUFFIXES
        and path.name != "__init__.py"
        and path.parent != PACKAGE
        and "__pycache__" not in path.parts
    )


def test_every_file_is_listed() -> None:
    missing = [path.relative_to(PACKAGE).as_posix() for path in files() if not is_listed(path)]
    assert not missing


def test_nothing_is_listed_that_is_gone() -> None:
    gone = [
        f"{readme.relative_to(PACKAGE)}: {name}"
        for readme in sorted(PACKAGE.rglob("README.md"))
        for name in _LINE.findall(readme.read_text())
        if not (readme.parent / name).exists()
    ]
    assert not gone


def test_the_rule_sees_what_is_missing() -> None:
    assert is_listed(PACKAGE / "platform" / "facts.py")
    assert not is_listed(PACKAGE / "platform" / "no_such_file.py")
