"""Each check: silent on a healthy machine, exact on a sick one, honest about the unread."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sample_machines import (
    card,
    healthy,
    link,
    losing,
    peer,
    processor,
    with_card,
    with_facts,
    with_host,
    with_local,
    with_software,
    without_local,
)

from metainfer.core.verdict import Reason
from metainfer.doctor.checks import environment
from metainfer.doctor.finding import Finding, Severity
from metainfer.doctor.inputs import Disk, Inputs, gather, probe_disk
from metainfer.doctor.report import CHECKS, run_checks
from metainfer.platform.discovery import select_platform
from metainfer.platform.facts import DeviceFacts, Facts

NOTES_OF_HEALTH = {"gpu.ecc", "link.peer-claimed"}


def found(inputs: Inputs) -> dict[str, Finding]:
    """Findings by id, without those that a healthy machine has; one per id."""
    return {f.id: f for f in run_checks(inputs) if f.id not in NOTES_OF_HEALTH}


def only(inputs: Inputs) -> Finding:
    findings = found(inputs)
    assert len(findings) == 1, findings
    return next(iter(findings.values()))


@pytest.mark.parametrize("inputs", [healthy(), healthy(1), processor()])
def test_a_healthy_machine_has_only_notes(inputs: Inputs) -> None:
    assert found(inputs) == {}
    assert all(f.severity is Severity.INFORMATION for f in run_checks(inputs))


def test_every_check_survives_a_machine_of_which_nothing_is_known() -> None:
    for kind in ("cpu", "cuda", "fake"):
        bare = DeviceFacts(kind=kind, name="?")
        inputs = Inputs(facts=Facts(platform=kind, devices=(bare, bare)))
        findings = run_checks(inputs)
        assert findings
        assert all(f.severity is Severity.INFORMATION for f in findings), findings
        assert all(f.what.startswith("unknown: ") for f in findings)
        assert all(f.id.endswith(".unknown") for f in findings)


def test_every_check_file_is_run() -> None:
    import metainfer.doctor.checks as package

    files = {path.stem for path in Path(package.__file__).parent.glob("*.py")} - {"__init__"}
    assert {check.__module__.rpartition(".")[2] for check in CHECKS} == files


def test_this_machine_can_be_examined() -> None:
    inputs = gather(select_platform("cpu"))
    assert all(finding.id and finding.where and finding.what for finding in run_checks(inputs))


# software


@pytest.mark.parametrize(
    ("versions", "finding", "severity", "words"),
    [
        ({"torch": None}, "software.torch", "blocker", "not installed"),
        ({"torch": "2.10.1"}, "software.torch", "blocker", "2.11 to 2.13"),
        ({"torch": "2.14.0"}, "software.torch", "blocker", "2.11 to 2.13"),
        ({"torch": "git"}, "software.torch.unknown", "information", "git"),
        ({"torch": "2.12.0+cpu"}, "software.torch-build", "blocker", "without CUDA"),
        ({"triton": None}, "software.triton", "slows", "not installed"),
        ({"triton": "3.6.0"}, "software.pair", "information", "pins Triton 3.7"),
        ({"python": "3.10.9"}, "software.python", "blocker", "3.10.9"),
        ({"nvidia_driver": None}, "software.driver.unknown", "information", "driver"),
    ],
)
def test_versions(versions: dict[str, str | None], finding: str, severity: str, words: str) -> None:
    seen = only(with_software(healthy(), **versions))
    assert seen.id == finding and seen.severity.value == severity
    assert words in seen.what + seen.remedy


@pytest.mark.parametrize("version", ["2.11.0", "2.13.7+cu130"])
def test_the_ends_of_the_range_are_inside(version: str) -> None:
    assert "software.torch" not in found(with_software(healthy(), torch=version))


def test_a_processor_needs_no_triton_and_no_driver() -> None:
    inputs = with_software(processor(), triton=None, nvidia_driver=None, torch="2.13.0+cpu")
    assert found(inputs) == {}


# environment


def test_an_unknown_name_of_ours_blocks_and_is_corrected() -> None:
    seen = only(with_local(processor(), environ={"METAINFER_CASHE": "/x", "METAINFER_LOG": "x"}))
    assert seen.id == "env.unknown-name" and seen.severity is Severity.BLOCKER
    assert seen.where == "METAINFER_CASHE" and "METAINFER_CACHE" in seen.remedy


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "a:1, Expandable_Segments : true"}, "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, None),
    ],
)
def test_b16_growing_segments_are_told(environ: dict[str, str], name: str | None) -> None:
    assert environment.expandable_segments(environ) == name
    findings = found(with_local(healthy(), environ=environ))
    if name is None:
        assert findings == {}
    else:
        seen = findings["env.expandable-segments"]
        assert seen.where == name and seen.severity is Severity.INFORMATION
        assert "cannot be exported" in seen.what
    assert found(with_local(processor(), environ=environ)) == {}  # no IPC on a processor


@pytest.mark.parametrize(
    ("value", "words"), [("1,0", "'1,0'"), ("", "every CUDA device is hidden")]
)
def test_b18_hidden_devices_are_told(value: str, words: str) -> None:
    assert found(with_local(healthy(), environ={})) == {}
    seen = only(with_local(healthy(), environ={"CUDA_VISIBLE_DEVICES": value}))
    assert seen.id == "env.visible-devices" and words in seen.what


@pytest.mark.parametrize(
    ("threads", "words"),
    [("8", "24 of 32"), ("64", "more threads"), ("32", None), ("many", None), ("8,2", "24 of 32")],
)
def test_thread_counts(threads: str, words: str | None) -> None:
    findings = found(with_local(processor(), environ={"OMP_NUM_THREADS": threads}))
    assert set(findings) == ({"env.threads"} if words else set())
    assert words is None or words in findings["env.threads"].what


# host


def test_container_limits_are_told() -> None:
    inputs = with_host(healthy(), usable_cores=4, memory_bytes=8 << 30)
    findings = found(inputs)
    assert findings["host.cores"].what.startswith("4 of the machine's 32 processors")
    assert "affinity mask" in findings["host.cores"].what
    assert "8.0 of the machine's 256.0 GiB" in findings["host.memory"].what


def test_little_free_memory_is_told() -> None:
    probe = dataclasses.replace(healthy().local.host, available_bytes=60 << 30)  # type: ignore[union-attr]
    assert only(with_local(healthy(), host=probe)).id == "host.memory-free"


def test_no_compiler_slows_here_and_is_unknown_elsewhere() -> None:
    inputs = with_host(healthy(), compiler=None)
    assert only(inputs).severity is Severity.SLOWS
    assert "host.compiler.unknown" in found(without_local(inputs))


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("always madvise [never]", "host.huge-pages"),
        (None, "host.huge-pages.unknown"),
        ("[always] madvise never", None),
    ],
)
def test_huge_pages(text: str | None, finding: str | None) -> None:
    assert list(found(with_local(processor(), huge_pages=text))) == ([finding] if finding else [])


# processor


def test_vector_instructions() -> None:
    scalar = only(processor(features=frozenset({"sse2"})))
    assert scalar.id == "cpu.vectors" and scalar.severity is Severity.SLOWS
    middle = only(processor(features=frozenset({"avx2", "fma", "avx512f"})))
    assert "AVX2 path" in middle.what
    assert found(processor(features=frozenset({"asimd"}))) == {}
    assert only(processor(features=None)).id == "cpu.features.unknown"
    assert only(processor(dot_types=frozenset({"float32"}))).id == "cpu.bfloat16"


# GPUs


def test_a_power_cap_names_the_card_and_both_numbers() -> None:
    seen = only(with_card(healthy(), power_cap_w=300.0))
    assert seen.id == "gpu.power" and seen.severity is Severity.SLOWS
    assert seen.where == "GPU 1 (0000:42:00.0, RTX 6000D)"
    assert "300 W of 600 W" in seen.what and "-i 0000:42:00.0 -pl 600" in seen.remedy


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"power_cap_w": None}, "gpu.power.unknown"),
        ({"ecc": None}, "gpu.ecc.unknown"),
        ({"bar_bytes": None}, "link.window.unknown"),
        ({"dot_types": None}, "gpu.instructions.unknown"),
    ],
)
def test_what_a_card_does_not_tell_is_unknown(change: dict[str, object], finding: str) -> None:
    seen = only(with_card(healthy(), **change))
    assert seen.id == finding and seen.what.startswith("unknown: ")
    assert seen.where.startswith("GPU 1")


def test_unequal_cards() -> None:
    seen = only(with_card(healthy(), name="RTX 5090", memory_bytes=32 << 30))
    assert seen.id == "gpu.unlike" and "RTX 5090, RTX 6000D" in seen.what


def replace_link(new: object) -> Inputs:
    inputs = healthy()
    kept = [
        old
        for old in inputs.facts.links
        if (old.source, old.target) != (new.source, new.target)  # type: ignore[attr-defined]
    ]
    return with_facts(inputs, links=(*kept, new))


def test_b14_a_narrow_link() -> None:
    seen = only(replace_link(link(1, width=8)))
    assert seen.id == "link.width" and seen.severity is Severity.SLOWS
    assert "x8 of x16" in seen.what and seen.where.startswith("GPU 1")


def test_b14_a_slow_link_may_only_be_idle() -> None:
    seen = only(replace_link(link(0, generation=1)))
    assert seen.id == "link.generation" and seen.severity is Severity.INFORMATION
    assert "generation 1 of 5" in seen.what and "idle" in seen.what


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"width": None}, "link.width.unknown"),
        ({"generation": None}, "link.generation.unknown"),
        ({"max_generation": None}, "link.generation.unknown"),
    ],
)
def test_b14_an_unreadable_link_is_unknown_not_ok(change: dict[str, object], finding: str) -> None:
    assert only(replace_link(link(1, **change))).id == finding


def test_b14_a_small_memory_window() -> None:
    seen = only(with_card(healthy(), bar_bytes=256 << 20))
    assert seen.id == "link.window" and seen.severity is Severity.SLOWS
    assert "256 MiB" in seen.what and "resizable BAR" in seen.remedy
    alone = with_facts(healthy(1), devices=(card(bar_bytes=256 << 20),))
    assert only(alone).severity is Severity.INFORMATION


def test_b14_translation_matters_between_cards() -> None:
    seen = only(with_host(healthy(), iommu="translated"))
    assert seen.id == "link.iommu" and seen.severity is Severity.SLOWS
    assert "iommu=pt" in seen.remedy
    assert list(found(with_host(healthy(), iommu="off"))) == ["link.iommu-off"]
    assert only(with_host(healthy(), iommu=None)).id == "link.iommu.unknown"
    assert found(with_host(healthy(1), iommu="translated")) == {}


def test_refused_peer_access_names_direction_and_kind() -> None:
    seen = only(replace_link(peer(1, 0, peer_write=False)))
    assert seen.id == "link.peer-write" and seen.severity is Severity.SLOWS
    assert seen.where == "GPUs 1->0" and "1 of 2 directed pairs" in seen.what


def test_unread_peer_access_is_unknown() -> None:
    seen = only(replace_link(peer(0, 1, peer_read=None)))
    assert seen.id == "link.peer-read.unknown" and "GPUs 0->1" in seen.where
    missing = with_facts(healthy(), links=tuple(healthy().facts.links[:2]))
    kinds = ("read", "write", "atomics")
    assert set(found(missing)) == {f"link.peer-{kind}.unknown" for kind in kinds}


def test_claimed_peer_access_is_not_called_proven() -> None:
    claims = [f for f in run_checks(healthy()) if f.id == "link.peer-claimed"]
    assert "only a data test proves it" in claims[0].what


# disk and platform


@pytest.mark.parametrize(
    ("disk", "finding", "severity"),
    [
        (Disk(Path("/c"), 100 << 20, True), "disk.space", "blocker"),
        (Disk(Path("/c"), 2 << 30, True), "disk.space", "slows"),
        (Disk(Path("/c"), 100 << 30, False), "disk.permission", "blocker"),
        (Disk(Path("/c"), None, True), "disk.space.unknown", "information"),
    ],
)
def test_disk(disk: Disk, finding: str, severity: str) -> None:
    seen = only(with_local(processor(), disk=disk))
    assert (seen.id, seen.severity.value, seen.where) == (finding, severity, "/c")


def test_disk_looks_at_the_nearest_existing_parent(tmp_path: Path) -> None:
    disk = probe_disk(tmp_path / "a" / "b")
    assert disk.folder == tmp_path / "a" / "b" and disk.writable and disk.free_bytes
    (tmp_path / "file").touch()
    assert not probe_disk(tmp_path / "file" / "below").writable


def test_disk_asks_for_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may do everything
    assert not probe_disk(tmp_path / "cache").writable


def test_falling_to_the_processor_is_seen() -> None:
    lost = losing("cuda", Reason("device", "no NVIDIA driver here"))
    seen = only(with_local(processor(), platform_losers=(lost,)))
    assert seen.where == "platform cuda" and "no NVIDIA driver here" in seen.what
    ranked = losing("cpu", Reason("rank", "cuda comes first"))
    assert found(with_local(healthy(), platform_losers=(ranked,))) == {}


def test_another_machine_says_nothing_about_this_process() -> None:
    sick = with_local(
        healthy(),
        environ={"METAINFER_TYPO": "1", "CUDA_VISIBLE_DEVICES": ""},
        disk=Disk(Path("/c"), 0, False),
    )
    assert len(found(sick)) == 3
    assert list(found(without_local(sick))) == ["link.acs.unknown"]  # no file says that
