"""Hosts as text, each with exactly the findings that it must have (field case B-14)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import remedies

from metainfer.cli import main
from metainfer.doctor.finding import Finding, Severity
from metainfer.doctor.inputs import from_text
from metainfer.doctor.report import doctor, exit_status, run_checks
from metainfer.doctor.text_report import text as shown
from metainfer.platform import host_text
from metainfer.platform.host_text import HostText

FIXTURES = Path(__file__).parent / "fixtures"
#: On every host: each card corrects errors; the driver allows peers, without native atomics.
EVERYWHERE = {"gpu.ecc", "link.peer-claimed", "link.peer-atomics"}
SLOWS, NOTE = Severity.SLOWS, Severity.INFORMATION
EACH = ("GPU 0", "GPU 1")

EXPECTED: dict[str, set[tuple[Severity, str, str]]] = {
    "clean-switch": set(),
    "iommu-pass-through": set(),
    "acs-root": {
        (SLOWS, "link.acs", "root port 0000:15:01.0"),
        (SLOWS, "link.acs", "root port 0000:48:01.0"),
    },
    "acs-downstream": {
        (SLOWS, "link.acs", f"downstream port 0000:{bus}")
        for bus in ("17:00.0", "17:08.0", "4a:00.0", "4a:08.0")
    },
    "iommu-translated": {(SLOWS, "link.iommu", "IOMMU")},
    "iommu-off": {(NOTE, "link.iommu-off", "IOMMU")},
    "x8-link": {(SLOWS, "link.width", "GPU 1 (0000:36:00.0")},
    "small-bar": {(SLOWS, "link.window", gpu) for gpu in EACH},
    "two-sockets": {(NOTE, "numa.spread", "all GPUs")},
    "container": {
        (NOTE, "container.inside", "process"),
        (NOTE, "container.shm", "/dev/shm"),
        (SLOWS, "host.compiler", "C compiler"),
        (NOTE, "host.cores", "processor"),
        (NOTE, "host.memory", "memory"),
        (NOTE, "link.acs.unknown", "PCIe ports"),
    },
    "unreadable": {
        (NOTE, "container.unknown", "process"),
        (NOTE, "host.overcommit.unknown", "/proc/sys/vm/overcommit_memory"),
        (NOTE, "link.acs.unknown", "port 0000:15:01.0"),
        (NOTE, "link.iommu.unknown", "IOMMU"),
        (NOTE, "link.peer-read.unknown", "GPUs 0->1, 1->0"),
        (NOTE, "link.peer-write.unknown", "GPUs 0->1, 1->0"),
        (NOTE, "link.peer-atomics.unknown", "GPUs 0->1, 1->0"),
    }
    | {
        (NOTE, f"{check}.unknown", gpu)
        for gpu in EACH
        for check in (
            "gpu.memory",
            "gpu.ecc",
            "gpu.capability",
            "gpu.power",
            "gpu.throttle",
            "link.width",
            "link.window",
        )
    },
}


def fixture(name: str) -> HostText:
    return host_text.read_file(FIXTURES / f"{name}.txt")


def findings(text: HostText) -> list[Finding]:
    return [f for f in run_checks(from_text(text)) if f.id not in EVERYWHERE]


def test_every_fixture_has_its_expectation() -> None:
    assert {path.stem for path in FIXTURES.glob("*.txt")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_b14_exactly_the_findings_of_each_host(name: str) -> None:
    left = set(EXPECTED[name])
    for finding in findings(fixture(name)):
        matched = {
            row
            for row in left
            if row[:2] == (finding.severity, finding.id) and finding.where.startswith(row[2])
        }
        assert matched, finding
        left -= matched
    assert not left


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_finding_says_how_it_is_known_and_what_its_remedy_risks(name: str) -> None:
    for finding in run_checks(from_text(fixture(name))):
        assert finding.evidence.strip(), finding
        assert bool(finding.risk) == bool(finding.remedy), finding
        if finding.severity is not Severity.INFORMATION:
            assert finding.remedy, finding


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_evidence_is_a_line_of_the_text_or_a_fact_with_origin(name: str) -> None:
    text = fixture(name)
    everything = " ".join(" ".join(body.split()) for body in text.texts.values())
    for finding in run_checks(from_text(text)):
        quoted = finding.evidence.partition(": ")[2] or finding.evidence
        last = " ".join(quoted.rsplit(": ", 1)[-1].split())
        read = last in everything or last.partition(" (")[0] in everything.split()
        refused = any(why in finding.evidence for why in text.refused.values())
        assert read or refused or "(probed" in finding.evidence or "exists" in finding.evidence, (
            finding
        )


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_document_and_its_text(name: str) -> None:
    document = doctor(printed=fixture(name))
    assert exit_status(document) == 0
    words = " ".join(shown(document).split())
    rows = document["findings"]
    assert isinstance(rows, list)
    for row in rows:
        assert " ".join(row["evidence"].split()) in words


def test_b14_unreadable_is_unknown_and_never_ok() -> None:
    found = findings(fixture("unreadable"))
    assert found and all(f.id.endswith(".unknown") for f in found)
    assert all(f.what.startswith("unknown: ") for f in found)
    assert "link.peer-claimed" not in {f.id for f in run_checks(from_text(fixture("unreadable")))}


def test_b14_the_two_kinds_of_redirect_are_told_apart() -> None:
    root = findings(fixture("acs-root"))
    down = findings(fixture("acs-downstream"))
    assert all("below other ports" in f.what for f in root)
    assert all("below this switch" in f.what and "hangs" in f.what for f in down)
    for finding in (*root, *down):
        address = finding.where.split()[2].rstrip(",")
        assert f"setpci -s {address} ECAP_ACS+6.w=0:2c" in finding.remedy
        assert "virtual machines" in finding.risk and "ReqRedir+" in finding.evidence


def test_b14_one_port_above_all_cards_is_only_a_note() -> None:
    text = fixture("acs-root")
    # Take the second switch away: nothing leaves through the first root port then.
    kept = dict(text.texts)
    lspci = kept[host_text.LSPCI]
    kept[host_text.LSPCI] = lspci[: lspci.index("0000:48:01.0 PCI bridge")]
    smi = kept[host_text.SMI_QUERY]
    kept[host_text.SMI_QUERY] = smi[: smi.index("GPU 00000000:4B:00.0")]
    (finding,) = findings(HostText(kept, text.refused))
    assert finding.id == "link.acs" and finding.severity is Severity.INFORMATION
    assert "all GPUs are below this port" in finding.what


def test_a_card_below_no_visible_bridge_is_unknown() -> None:
    text = fixture("iommu-pass-through")
    kept = dict(text.texts)
    kept[host_text.LSPCI] = kept[host_text.LSPCI].replace("secondary=16", "secondary=99")
    (finding,) = findings(HostText(kept, text.refused))
    assert finding.id == "link.acs.unknown" and "GPU 0" in finding.where


def test_a_host_is_saved_and_examined_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("METAINFER_API_KEY", "s3cret")
    path = tmp_path / "host.txt"
    assert main.run(["doctor", "--save-host-text", str(path)]) == 0
    assert f"host text: {path}" in capsys.readouterr().out
    body = path.read_text()
    assert "NCCL_DEBUG=INFO" in body and "s3cret" not in body
    assert main.run(["doctor", "--host-text", str(path), "--json"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--host-text", "nowhere.txt"],
        ["--host-text", "{file}", "--machine", "8x-l20"],
        ["--host-text", "{file}", "--deep"],
        ["--host-text", "{file}", "--model", "random:tiny-llama"],
        ["--machine", "8x-l20", "--deep"],
        ["--machine", "8x-l20", "--save-host-text", "x.txt"],
    ],
)
def test_wishes_that_contradict_are_bad_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(FIXTURES / "x8-link.txt")
    assert main.run(["doctor", *(word.format(file=file) for word in words)]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and shown[0].startswith("error: ")


def test_cards_that_cuda_numbers_otherwise_keep_their_own_lines() -> None:
    """CUDA may list cards in another order than NVIDIA's tools; the bus address decides."""
    text = fixture("x8-link")
    peers = "nvidia-smi topo -p2p r"
    inputs = from_text(remedies.edit(text, peers, r"^GPU1\s+OK", "GPU1\tCNS"))
    first, second = inputs.facts.devices
    links = tuple(
        dataclasses.replace(
            link,
            source=1 - link.source if link.source >= 0 else -1,
            target=1 - link.target,
        )
        for link in inputs.facts.links
    )
    facts = dataclasses.replace(inputs.facts, devices=(second, first), links=links)
    found = {f.id: f for f in run_checks(dataclasses.replace(inputs, facts=facts))}
    assert found["link.width"].where.startswith("GPU 0 (0000:36:00.0")
    assert "0000:36:00.0 LnkSta" in found["link.width"].evidence
    refused = found["link.peer-read"]
    assert refused.where == "GPUs 0->1"  # the tool's GPU1 to GPU0
    assert "GPU1 to GPU0: CNS (chipset not supported)" in refused.evidence
