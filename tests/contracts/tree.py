"""The source tree as data, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "metainfer"


def modules() -> list[str]:
    """Every module of the package as a dotted name below it: ``core.step``, ``ops.norm.impls``."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if parts:
            found.append(".".join(parts))
    return sorted(found)


def packages() -> set[str]:
    """Dotted names of all packages below ours."""
    found = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")}
    return {".".join(path.parts) for path in found if path.parts}


def source_files(*suffixes: str) -> Iterator[Path]:
    """Files of the package and its tests with one of `suffixes`."""
    for folder in ("metainfer", "tests", "examples", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function, decorators left out, nested ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def public_names(module: str) -> list[str]:
    """Top-level names that a module defines for others: no underscore, not imported."""
    path = PACKAGE / (module.replace(".", "/") + ".py")
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return sorted(name for name in names if not name.startswith("_"))
