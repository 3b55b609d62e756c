"""What a person reads says what is wrong and what to do: two texts, never one."""

from __future__ import annotations

import ast

from tree import PACKAGE

READ_BY_PEOPLE = {"UserError", "UsageError", "ModelError", "RefusedError"}
VOIDS_PROOFS = PACKAGE / "ops"
"""An edit there makes every kernel of its folder prove itself again: left to who edits kernels."""


def raised(source: str) -> list[tuple[int, ast.Call]]:
    """Where errors for people are raised."""
    return [
        (node.lineno, node.exc)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id in READ_BY_PEOPLE
    ]


def has_remedy(call: ast.Call) -> bool:
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    return starred or len(call.args) > 1 or any(each.arg == "remedy" for each in call.keywords)


def test_every_error_for_people_has_a_remedy() -> None:
    found = {
        path: raised(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(VOIDS_PROOFS)
    }
    assert sum(map(len, found.values())) > 200
    lacking = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path, calls in found.items()
        for line, call in calls
        if not has_remedy(call)
    ]
    assert not lacking
