"""Files under 500 lines, functions under 80; one kernel of a kernel file may take 200. Modules of
tests have names of their own: they are imported by them alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tree import ROOT, functions, source_files

FILE_LINES = 500
FUNCTION_LINES = 80
KERNEL_LINES = 200


def is_kernel_file(path: Path) -> bool:
    return "ops" in path.parts and path.stem.startswith(("triton", "cuda"))


def too_long(path: Path, lengths: list[tuple[str, int]]) -> list[str]:
    """Functions above the limit; the longest of a kernel file has a limit of its own."""
    over = sorted(((n, name) for name, n in lengths if n > FUNCTION_LINES), reverse=True)
    if is_kernel_file(path) and over and over[0][0] <= KERNEL_LINES:
        over = over[1:]
    return [f"{name} has {n} lines" for n, name in over]


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in source_files(".py", ".c", ".h", ".cu")
        if (count := path.read_text().count("\n")) > FILE_LINES
    }
    assert not long


def test_functions_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): over
        for path in source_files(".py")
        if (over := too_long(path, list(functions(path))))
    }
    assert not long


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Whichever of two is imported first stands for both, in one order of tests and not another."""
    files = [path.name for path in source_files(".py") if path.is_relative_to(ROOT / "tests")]
    shared = {name: n for name, n in Counter(files).items() if n > 1}
    assert shared.keys() <= {"conftest.py", "__init__.py"}


@pytest.mark.parametrize(
    ("path", "lengths", "over"),
    [
        ("metainfer/core/a.py", [("f", 80)], 0),
        ("metainfer/core/a.py", [("f", 81)], 1),
        ("metainfer/ops/norm/triton.py", [("f", 200), ("g", 80)], 0),
        ("metainfer/ops/norm/triton.py", [("f", 200), ("g", 81)], 1),
        ("metainfer/ops/norm/triton.py", [("f", 201)], 1),
        ("metainfer/ops/norm/ref.py", [("f", 200)], 1),
    ],
)
def test_the_rule_itself(path: str, lengths: list[tuple[str, int]], over: int) -> None:
    assert len(too_long(Path(path), lengths)) == over
