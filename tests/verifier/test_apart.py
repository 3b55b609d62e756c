"""References share no code with what they judge: no kernel imports a reference."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from metainfer.ops.catalog import builtin_registry


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    named = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    return {name for name in named if name} | plain


def sources(module: str, seen: set[str]) -> set[str]:
    """Modules of ops that `module` reaches, itself included."""
    if module in seen or not module.startswith("metainfer.ops."):
        return seen
    seen.add(module)
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    for name in imports(Path(spec.origin)):
        sources(name, seen)
    return seen


def test_no_kernel_reaches_a_reference() -> None:
    registry = builtin_registry()
    refs = {i.load.partition(":")[0] for i in registry.impls() if i.provider == "reference"}
    reaching = {
        impl.id: sorted(refs & sources(impl.load.partition(":")[0], set()))
        for impl in registry.impls()
        if impl.provider != "reference"
    }
    assert len(reaching) > 40
    assert {impl: found for impl, found in reaching.items() if found} == {}
