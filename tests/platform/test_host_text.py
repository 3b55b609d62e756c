"""The host as text: reading, the file form, secrets, and what NVIDIA's tools and lspci print."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import UsageError
from metainfer.platform import host_text, text_facts
from metainfer.platform.host_text import HostText, parse, read_host_text, render
from metainfer.platform.lspci import parse_lspci
from metainfer.platform.nvidia_smi import parse_capabilities, parse_matrix, parse_query
from metainfer.platform.probe_host import members
from metainfer.platform.text_root import TextRoot

FIXTURES = Path(__file__).parents[1] / "doctor" / "fixtures"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.txt"))


def fixture(name: str) -> HostText:
    return host_text.read_file(FIXTURES / f"{name}.txt")


def nothing(command: str) -> tuple[str | None, str]:
    return None, f"no {command.split()[0]}"


# the file form

KEYS = st.from_regex(
    r"/[a-z]{1,8}(/[a-z0-9:.]{1,8}){0,2}|[a-z]{2,8}( -[a-z]{1,3})?", fullmatch=True
)
BODIES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp")), max_size=40)


@given(
    st.dictionaries(KEYS, BODIES.filter(lambda body: not body.startswith("#")), min_size=1),
    st.dictionaries(KEYS, st.just("Permission denied: really")),
)
def test_what_is_written_reads_back(texts: dict[str, str], refused: dict[str, str]) -> None:
    refused = {key: why for key, why in refused.items() if key not in texts}
    again = parse(render(HostText(texts, refused)), "file")
    assert again.refused == refused
    assert {key: body.removesuffix("\n") for key, body in again.texts.items()} == texts


@pytest.mark.parametrize("name", NAMES)
def test_fixtures_are_what_render_writes(name: str) -> None:
    text = fixture(name)
    again = parse(render(text), name)
    assert again.refused == text.refused
    assert {k: v.strip() for k, v in again.texts.items()} == {
        k: v.strip() for k, v in text.texts.items()
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "holds no"),
        ("hello\n#@ /a\nb", "f:1: text that belongs to no"),
        ("#@ /a\nb\n#@ /a\nc", "f:3: /a is given twice"),
    ],
)
def test_a_malformed_file_is_a_usage_error(body: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(body, "f")


def test_serial_numbers_do_not_leave_the_machine() -> None:
    body = "    Serial Number      : 1324823000123\n    GPU UUID  : GPU-5f2e\n    Bus : 0x18\n"
    written = render(HostText({"nvidia-smi -q": body}))
    assert "1324823000123" not in written and "GPU-5f2e" not in written and "0x18" in written


def test_secrets_and_other_programs_variables_are_left_out() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "METAINFER_API_KEY": "s3cret",
        "HF_TOKEN": "t0ken",
        "CUDA_HOME": "/usr",
        "TORCH_TOKEN_X": "hush",
    }
    text = read_host_text(Path("/nowhere"), environ, {"torch": "2.12", "triton": None}, nothing)
    kept = text.pairs(host_text.ENVIRONMENT)
    assert kept == {
        "CUDA_HOME": "/usr",
        "METAINFER_API_KEY": host_text.HIDDEN,
        "NCCL_DEBUG": "INFO",
        "TORCH_TOKEN_X": host_text.HIDDEN,
    }
    assert "s3cret" not in render(text) and "hush" not in render(text)
    assert text.pairs(host_text.SOFTWARE) == {"torch": "2.12", "triton": ""}


def test_what_is_missing_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("ro iommu=pt\n")
    text = read_host_text(tmp_path, {}, {}, nothing)
    assert text.line("/proc/cmdline") == "ro iommu=pt"
    assert text.get("/proc/meminfo") is None
    assert text.why_not("/proc/meminfo") == "/proc/meminfo: No such file or directory"
    assert text.why_not(host_text.LSPCI) == "lspci -D -vvv: no lspci"
    assert text.why_not("/never") == "/never: not asked for"


def test_commands_are_bounded_and_their_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_text.run_command("no-such-command-here -x") == (None, "command not found")
    assert host_text.run_command("false") == (None, "exit status 1")
    assert host_text.run_command("echo hello") == ("hello\n", "")
    monkeypatch.setattr(host_text, "COMMAND_TIMEOUT_S", 0.2)
    assert host_text.run_command("sleep 600") == (None, "no answer within 0 s")


def test_a_fixture_lays_out_as_a_root_that_the_probe_reads() -> None:
    host = text_facts.host_of(fixture("two-sockets"))
    assert (host.facts.numa_nodes, host.facts.sockets, host.facts.usable_cores) == (2, 2, 64)
    assert host.facts.iommu == "pass-through" and host.facts.architecture is None
    assert host.facts.compiler is not None and host.facts.compiler.startswith("cc: cc (Ubuntu")
    assert text_facts.host_of(fixture("iommu-off")).facts.iommu == "off"
    assert text_facts.host_of(fixture("iommu-translated")).facts.iommu == "translated"
    assert text_facts.host_of(fixture("unreadable")).facts.iommu is None
    inside = text_facts.host_of(fixture("container")).facts
    assert inside.usable_cores == 8 and inside.memory_bytes == 64 << 30 and inside.compiler is None


def test_files_in_a_text_behave_as_in_a_file_system() -> None:
    root = TextRoot({"/a/b/c1": "x", "/a/b/c2": "y", "/a/list/": "d e\n", "/a": "file", "cmd": "z"})
    assert sorted(path.name for path in root.glob("a/b/c[0-9]")) == ["c1", "c2"]
    assert [path.name for path in root.glob("a/*")] == ["b", "list"]
    assert list(root.glob("a/b/c1/deeper")) == [] and list(root.glob("x/*")) == []
    assert list((root / "a").glob("b/*/*")) == []
    assert (root / "a" / "b" / "c1").read_text() == "x" and (root / "a/b").exists()
    assert not (root / "a/c").exists() and [p.name for p in (root / "a/list").iterdir()] == [
        "d",
        "e",
    ]
    for missing in (root / "a/c", root / "a/b"):
        with pytest.raises(FileNotFoundError):
            missing.read_text()
        with pytest.raises(FileNotFoundError):
            missing.iterdir()


# lspci


def test_the_tree_of_a_switch_host() -> None:
    tree = text_facts.read_tree(fixture("clean-switch"))
    assert tree is not None
    chain = tree.chain("0000:19:00.0")
    assert [(port.address, port.port) for port in chain] == [
        ("0000:17:08.0", "Downstream Port"),
        ("0000:16:00.0", "Upstream Port"),
        ("0000:15:01.0", "Root Port"),
    ]
    gpu = tree.devices["0000:19:00.0"]
    assert (gpu.speed, gpu.width, gpu.max_speed, gpu.max_width) == (5, 16, 5, 16)
    assert gpu.window == 128 << 30 and gpu.numa_node == 0
    assert chain[0].acs is not None and chain[0].redirects == ()
    assert text_facts.switch_of(tree, "0000:19:00.0") == "0000:16:00.0"
    assert text_facts.switch_of(tree, "0000:99:00.0") is None


def test_denied_is_not_absent() -> None:
    tree = text_facts.read_tree(fixture("unreadable"))
    assert tree is not None
    port = tree.devices["0000:15:01.0"]
    assert port.denied and port.acs is None and port.width is None


@pytest.mark.parametrize(
    ("line", "speed", "width"),
    [
        ("LnkSta:\tSpeed 2.5GT/s (downgraded), Width x8 (downgraded)", 1, 8),
        ("LnkSta: Speed 16GT/s, Width x16 (ok)", 4, 16),
        ("LnkSta:\tSpeed 64GT/s (ok), Width x4", 6, 4),
        ("LnkSta:\tSpeed 2.5GT/s, Width x0", 1, None),
        ("LnkSta:\tSpeed unknown, Width x16", None, None),
    ],
)
def test_link_lines(line: str, speed: int | None, width: int | None) -> None:
    tree = parse_lspci(f"0000:01:00.0 3D controller: X\n\t\t{line}\n")
    device = tree.devices["0000:01:00.0"]
    assert (device.speed, device.width) == (speed, width)


def test_a_loop_of_bridges_ends() -> None:
    text = "\n".join(
        f"0000:0{n}:00.0 PCI bridge: X\n\tBus: primary=0{n}, secondary=0{3 - n}, subordinate=03"
        for n in (1, 2)
    )
    assert len(parse_lspci(text).chain("0000:01:00.0")) == 2


def test_garbage_gives_nothing() -> None:
    assert parse_lspci("").devices == {}
    assert parse_lspci("pcilib: Cannot open /proc/bus/pci\n\tx\n").devices == {}


# nvidia-smi


def test_the_query_by_path_with_its_line() -> None:
    report = text_facts.read_query(fixture("x8-link"))
    assert report is not None and report.driver == "580.95.05" and report.cuda == "13.0"
    first, second = report.gpus
    assert first.bus_id == "0000:16:00.0"
    assert second.number(text_facts.WIDTH_NOW) == 8 and second.number(text_facts.WIDTH_MOST) == 16
    assert second.line(text_facts.WIDTH_NOW) == "Current : 8x"
    assert (
        first.number(*text_facts.POWER_CAP) == 600 and first.size(*text_facts.WINDOW) == 128 << 30
    )
    assert first.text("Clocks Event Reasons/HW Slowdown/HW Thermal Slowdown") == "Not Active"


def test_no_value_is_no_value() -> None:
    (gpu,) = parse_query("GPU 00000000:01:00.0\n    A\n        B : N/A\n        C : 5 W\n").gpus
    assert gpu.text("A/B") is None and gpu.number("A/B") is None and gpu.size("A/C") is None
    assert gpu.number("A/B", "A/C") == 5 and gpu.line("A/B") == "B : N/A"


def test_processes_are_listed_per_card() -> None:
    def entry(pid: str, used: str) -> str:
        return (
            f"        GPU instance ID : N/A\n        Process ID : {pid}\n            Type : C\n"
            f"            Name : python\n            Used GPU Memory : {used}\n"
        )

    text = (
        "GPU 00000000:01:00.0\n    Processes\n" + entry("7", "100 MiB") + entry("8", "N/A")
        + "GPU 00000000:02:00.0\n    Processes : None\n    Fan Speed : 3 %\n"
    )  # fmt: skip
    first, second = parse_query(text).gpus
    assert [(p.pid, p.name, p.used_bytes) for p in first.processes] == [
        (7, "python", 100 << 20),
        (8, "python", None),
    ]
    assert second.processes == [] and second.number("Fan Speed") == 3


def test_matrices_and_capabilities() -> None:
    text = fixture("two-sockets")
    topology = parse_matrix(text.get(host_text.SMI_TOPOLOGY) or "")
    assert topology[0, 1] == "NODE" and topology[0, 2] == "SYS" and (0, 0) not in topology
    assert set(parse_matrix(text.get(host_text.SMI_PEERS["read"]) or "").values()) == {"OK"}
    assert "\x1b[4m" in (text.get(host_text.SMI_TOPOLOGY) or "")  # as the tool prints it
    rows = "GPU0\t X \tPIX\tSYS\nGPU1\tPIX\t X \tPHB\nNIC0\tSYS\tPHB\t X \n"
    for head in ("\t\x1b[4mGPU0\tGPU1\tNIC0\tGPU NUMA ID\x1b[0m\n", "\tGPU0\tGPU1\tNIC0\n"):
        assert parse_matrix(head + rows) == {(0, 1): "PIX", (1, 0): "PIX"}
    assert parse_matrix("no matrix") == {}
    assert parse_capabilities("00000000:16:00.0, 12.0\nbad line\n") == {"0000:16:00.0": (12, 0)}


# facts


def test_facts_of_a_text_name_their_origin() -> None:
    text = fixture("two-sockets")
    facts = text_facts.facts_of(text, text_facts.host_of(text))
    assert facts.platform == "cuda" and len(facts.devices) == 4
    assert [device.numa_node for device in facts.devices] == [0, 0, 1, 1]
    assert facts.device.capability == (12, 0) and "block_scaled_mma" in (
        facts.device.features or ()
    )
    assert facts.device.units is None and facts.device.shared_bytes_per_block is None
    assert facts.origins["devices.0"] == "probed: nvidia-smi -q"
    assert not any(said.startswith("measured") for said in facts.origins.values())
    peers = [link for link in facts.links if link.source >= 0]
    assert len(peers) == 12 and all(p.peer_read is True and p.kind == "pcie" for p in peers)
    assert {link.peer_atomics for link in peers} == {False}


def test_a_text_without_cards_is_a_processor() -> None:
    text = HostText({k: v for k, v in fixture("container").texts.items() if "nvidia" not in k})
    facts = text_facts.facts_of(text, text_facts.host_of(text))
    assert facts.platform == "cpu" and facts.device.units == 8
    assert facts.device.features is not None and "avx512f" in facts.device.features


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", None), ("a-b", None), ("1,,2", None)],
)
def test_kernel_lists(text: str, expected: set[int] | None) -> None:
    assert members(text) == (None if expected is None else frozenset(expected))
