"""What a person reads says what is wrong and what to do: two texts, never one."""

from __future__ import annotations

import ast

import pytest
from tree import PACKAGE

READ_BY_PEOPLE = {"UserError", "UsageError", "ModelError", "RefusedError"}
VOIDS_PROOFS = PACKAGE / "ops"
"""Not looked at: sources there are part of what was proven on cards, and an edit makes every kernel
of its folder prove itself again. Three lack a remedy, for who edits those kernels next."""


def made(source: str) -> list[ast.Call]:
    """Where errors for people are made: raised at once, returned or kept."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if _name(call.func) in READ_BY_PEOPLE]


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def has_both(call: ast.Call) -> bool:
    """A cause and a remedy, neither of them an empty text."""
    if any(isinstance(each, ast.Starred) for each in call.args):
        return True
    named = {each.arg: each.value for each in call.keywords}
    texts = dict(zip(("cause", "remedy"), call.args, strict=False)) | named
    return all(key in texts and not empty(texts[key]) for key in ("cause", "remedy"))


def empty(text: ast.expr) -> bool:
    """Whether it may be an empty constant."""
    if isinstance(text, ast.IfExp):
        return empty(text.body) or empty(text.orelse)
    return isinstance(text, ast.Constant) and not str(text.value or "").strip()


def test_every_error_for_people_has_a_remedy() -> None:
    found = {
        path: made(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(VOIDS_PROOFS)
    }
    assert sum(map(len, found.values())) > 300
    lacking = [
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for path, calls in found.items()
        for call in calls
        if not has_both(call)
    ]
    assert not lacking


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('raise UserError("a", "b")', True),
        ('raise UserError(cause, remedy=f"{b}")', True),
        ("return errors.RefusedError(*both, reasons=reasons)", True),
        ('raise UserError("a")', False),
        ('return RefusedError("a", reasons=reasons)', False),
        ('found = errors.UsageError("a", code="b")', False),
        ('raise ModelError("a", "")', False),
        ('raise ModelError("a", remedy=" ")', False),
        ('raise ModelError("", "b")', False),
        ('raise ModelError("a", "b" if c else "")', False),
    ],
)
def test_what_lacks_one_is_found(text: str, right: bool) -> None:
    (call,) = made(text)
    assert has_both(call) is right
