"""What documents point to exists: relative links, and paths of this repository in backticks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tree import ROOT

DOCUMENTS = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    + [
        path
        for path in (ROOT / "docs").glob("*.md")
        if path.name != "log.md"  # tells of the past
    ]
)
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
_PATH = re.compile(r"`((?:benchmarks|docs|examples|metainfer|tests)/[\w./*-]+)`")
_DECISION = re.compile(r"ADR (\d{4})")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_named_exists(document: Path) -> None:
    text = document.read_text()
    gone = [link for link in _LINK.findall(text) if not (document.parent / link).exists()]
    gone += [path for path in _PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))]
    assert not gone


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_decisions_that_are_cited_exist(document: Path) -> None:
    cited = set(_DECISION.findall(document.read_text()))
    assert not [number for number in cited if not any(ROOT.glob(f"docs/adr/{number}-*.md"))]


def test_every_finding_is_explained() -> None:
    """Ids that the doctor's checks write down, alone or as a prefix, are in docs/doctor.md."""
    told = (ROOT / "docs" / "doctor.md").read_text()
    made = re.compile(r'\b(?:blocker|slows|information|Finding)\(\s*"([a-z]+)\.([a-z-]+)"')
    found = {
        match
        for path in (ROOT / "metainfer" / "doctor").rglob("*.py")
        for match in made.findall(path.read_text())
    }
    assert len(found) > 40
    missing = [
        f"{room}.{name}"
        for room, name in sorted(found)
        if f"`{room}.{name}`" not in told and f"`{room}.*`" not in told
    ]
    assert not missing


def test_every_field_case_has_a_test_and_every_such_test_a_case() -> None:
    """Cases are named at the front of a test, more than one where it shows more
    (``test_b20_b26_...``)."""
    listed = set(re.findall(r"^\| B-(\d+) ", (ROOT / "docs" / "field-cases.md").read_text(), re.M))
    named = {
        number
        for path in (ROOT / "tests").rglob("test_*.py")
        for cases in re.findall(r"def test_((?:b\d+_)+)", path.read_text())
        for number in re.findall(r"\d+", cases)
    }
    assert len(listed) == 36
    assert named == listed


def test_every_benchmark_is_listed() -> None:
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = [path.name for path in (ROOT / "benchmarks").glob("*.py")]
    assert scripts
    assert not [name for name in scripts if f"`{name}`" not in listed]


def test_every_decision_is_listed() -> None:
    listed = (ROOT / "docs" / "adr" / "README.md").read_text()
    missing = [
        path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md") if path.name not in listed
    ]
    assert not missing
