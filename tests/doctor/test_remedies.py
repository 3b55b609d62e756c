"""A printed remedy, followed to the letter, makes its check pass: 200 random broken hosts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import remedies
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.doctor.finding import Finding, Severity
from metainfer.doctor.inputs import from_text
from metainfer.doctor.report import CHECKS, run_checks
from metainfer.platform import host_text
from metainfer.platform.host_text import LSPCI, HostText

FIXTURES = Path(__file__).parent / "fixtures"
BASES = {
    name: host_text.read_file(FIXTURES / f"{name}.txt")
    for name in ("clean-switch", "iommu-pass-through", "two-sockets", "container")
}
#: Breaking these needs lspci, which the container has not.
NEED_LSPCI = (remedies.redirect, remedies.narrow_uplink)


def wrong(text: HostText) -> list[Finding]:
    """What the report grades above a note, and the note that a container's setting ends."""
    return [
        f
        for f in run_checks(from_text(text))
        if f.severity is not Severity.INFORMATION or f.id == "container.shm"
    ]


def same(finding: Finding, other: Finding) -> bool:
    return (finding.id, finding.where, finding.severity) == (other.id, other.where, other.severity)


def passes(text: HostText, finding: Finding) -> bool:
    inputs = from_text(text)
    return not any(same(finding, other) for check in CHECKS for other in check(inputs))


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(BASES)),
    st.lists(st.sampled_from(remedies.BREAKS), min_size=1, max_size=3, unique=True),
    st.integers(0, 2**32),
)
def test_the_printed_remedy_applied_makes_that_check_pass(
    base: str, breaks: list[object], seed: int
) -> None:
    text, rng = BASES[base], random.Random(seed)
    for change in breaks:
        if LSPCI in text.texts or change not in NEED_LSPCI:
            text = change(text, rng)  # type: ignore[operator]
    for finding in wrong(text):
        repaired = remedies.follow(text, finding)
        assert passes(repaired, finding), (finding, base)


@pytest.mark.parametrize("change", remedies.BREAKS, ids=lambda change: change.__name__)
def test_every_way_of_breaking_is_found(change: object) -> None:
    base = BASES["two-sockets" if change is remedies.far_node else "clean-switch"]
    text = change(base, random.Random(1))  # type: ignore[operator]
    if change in (remedies.narrow, remedies.small_window):  # not on the switch's own ports
        assert {f.id for f in wrong(text)} <= {"link.width", "link.window"}
    assert wrong(text) or change is remedies.old_software
    assert any(f not in run_checks(from_text(base)) for f in run_checks(from_text(text)))


def test_all_remedies_followed_one_by_one_end_in_a_healthy_host() -> None:
    text, rng = BASES["two-sockets"], random.Random(7)
    for change in remedies.BREAKS:
        if change is not remedies.unlike:
            text = change(text, rng)
    assert len(wrong(text)) >= 14
    for _ in range(40):
        left = wrong(text)
        if not left:
            break
        text = remedies.follow(text, left[0])
    assert wrong(text) == []


def test_the_operator_is_no_wizard() -> None:
    """A remedy that says the wrong thing does not repair: the interpreter follows words only."""
    text = remedies.redirect(BASES["clean-switch"], random.Random(3))
    (finding,) = wrong(text)
    address = finding.remedy.split("setpci -s ")[1].split()[0]
    lost = finding.remedy.replace("0:2c", "0:1")
    assert not passes(remedies.follow(text, _with(finding, lost)), finding)
    other = "0000:15:01.0" if address != "0000:15:01.0" else "0000:48:01.0"
    lost = finding.remedy.replace(address, other)
    assert not passes(remedies.follow(text, _with(finding, lost)), finding)
    with pytest.raises(AssertionError, match="nobody could follow"):
        remedies.follow(text, _with(finding, "Ask somebody."))


def _with(finding: Finding, remedy: str) -> Finding:
    import dataclasses

    return dataclasses.replace(finding, remedy=remedy)
