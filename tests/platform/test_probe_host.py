"""The host probe on machines written down as folders. Unreadable stays unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from metainfer.platform import probe_host as probe

CPUINFO = """\
processor : 0
model name\t: Test Processor 9000
flags\t\t: fpu avx2 avx512f amx_bf16

processor : 1
model name\t: Test Processor 9000
flags\t\t: fpu avx2 avx512f
"""


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_an_empty_machine_is_unknown_everywhere(tmp_path: Path) -> None:
    found = probe.probe_host(tmp_path)
    facts = found.facts
    for value in (
        facts.processor,
        facts.physical_cores,
        facts.sockets,
        facts.usable_cores,
        facts.memory_bytes,
        facts.numa_nodes,
        facts.iommu,
        facts.kernel,
        found.cpu_features,
        found.available_bytes,
        found.machine_cores,
    ):
        assert value is None


def test_this_machine_is_known() -> None:
    found = probe.probe_host()
    facts = found.facts
    assert facts.usable_cores and facts.memory_bytes and facts.processor and facts.kernel
    assert found.available_bytes and found.available_bytes <= facts.memory_bytes
    assert found.machine_cores and facts.usable_cores <= found.machine_cores
    assert set(found.origins) == {
        f"host.{name}"
        for name in facts.__slots__  # type: ignore[attr-defined]
        if name not in ("read_bytes_s", "dma_bytes_s", "price_hour")
    }
    assert all(text.startswith("probed: ") for text in found.origins.values())


def test_processor_and_the_features_that_every_core_has(tmp_path: Path) -> None:
    found = probe.probe_host(machine(tmp_path, {"proc/cpuinfo": CPUINFO}))
    assert found.facts.processor == "Test Processor 9000"
    assert found.cpu_features == {"fpu", "avx2", "avx512f"}  # amx_bf16 only on one


def test_an_arm_processor_without_a_model_name() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    assert probe.processor_name(text) == "implementer 0x41 part 0xd40"
    assert probe.cpu_features(text) == {"fp", "asimd"}


@pytest.mark.parametrize(
    ("files", "cores", "why"),
    [
        ({"proc/self/status": "Cpus_allowed_list:\t0-3,8\n"}, 5, "affinity mask"),
        ({"sys/devices/system/cpu/online": "0-63\n"}, 64, "online processors"),
        (
            {
                "proc/self/status": "Cpus_allowed_list:\t0-15\n",
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cpu.max": "290000 100000\n",
            },
            2,  # 2.9, rounded down
            "control group quota",
        ),
        (
            {
                "proc/self/status": "Cpus_allowed_list:\t0-15\n",
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cpu.max": "50000 100000\n",
            },
            1,  # never none
            "control group quota",
        ),
        (
            {
                "proc/self/status": "Cpus_allowed_list:\t0-3\n",
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            },
            3,  # an outer group limits an inner one
            "control group quota",
        ),
        (
            {
                "proc/self/status": "Cpus_allowed_list:\t0-7\n",
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n9:memory:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            4,
            "control group quota",
        ),
        (
            {
                "proc/self/status": "Cpus_allowed_list:\t0-7\n",
                "proc/self/cgroup": "4:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            8,  # -1 is "no quota"
            "affinity mask",
        ),
    ],
)
def test_usable_cores(tmp_path: Path, files: dict[str, str], cores: int, why: str) -> None:
    assert probe.usable_cores(machine(tmp_path, files)) == (cores, why)


MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:   12000000 kB\n"


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, 16_384_000_000, 12_288_000_000),
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.max": "8000000000\n",
                "sys/fs/cgroup/job/memory.current": "3000000000\n",
            },
            8_000_000_000,
            5_000_000_000,
        ),
        (
            {
                "proc/self/cgroup": "0::/outside/of/mount\n",
                "sys/fs/cgroup/memory.max": "4000000000\n",
                "sys/fs/cgroup/memory.current": "5000000000\n",
            },
            4_000_000_000,
            0,  # above the limit: nothing left, never negative
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1\n",
            },
            16_384_000_000,
            12_288_000_000,
        ),
    ],
)
def test_memory_counts_the_container(
    tmp_path: Path, files: dict[str, str], total: int, free: int
) -> None:
    found = probe.probe_host(machine(tmp_path, {"proc/meminfo": MEMINFO, **files}))
    assert found.facts.memory_bytes == total
    assert found.available_bytes == free
    assert found.machine_memory_bytes == 16_384_000_000


STAT = (
    "anon 9\nfile 4000000000\nshmem 1500000000\n"
    "{}inactive_file 1000000000\n{}active_file 500000000\n"
)


@pytest.mark.parametrize(
    ("files", "room", "source"),
    [
        ({"proc/meminfo": MEMINFO}, 12_288_000_000, "MemAvailable in /proc/meminfo"),
        ({}, None, "not known"),
        (
            {  # shared memory is a file to the kernel, and stays; the two lists can go
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.max": "8000000000\n",
                "sys/fs/cgroup/job/memory.current": "7000000000\n",
                "sys/fs/cgroup/job/memory.stat": STAT.format("", ""),
            },
            2_500_000_000,
            "control group limit of 8,000,000,000 B, 7,000,000,000 B of it used",
        ),
        (
            {  # version 1: with its children
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "3:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "8000000000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "7000000000\n",
                "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\nactive_file 1\n"
                + STAT.format("total_", "total_"),
            },
            2_500_000_000,
            "control group limit of 8,000,000,000 B, 7,000,000,000 B of it used",
        ),
        (
            {  # the tightest says so, and no list frees more than is used
                "proc/self/cgroup": "0::/pod/job\n",
                "sys/fs/cgroup/pod/job/memory.max": "8000000000\n",
                "sys/fs/cgroup/pod/job/memory.current": "7000000000\n",
                "sys/fs/cgroup/pod/memory.max": "900000000\n",
                "sys/fs/cgroup/pod/memory.current": "400000000\n",
                "sys/fs/cgroup/pod/memory.stat": STAT.format("", ""),
            },
            900_000_000,
            "control group limit of 900,000,000 B, 400,000,000 B of it used",
        ),
        (
            {  # a machine that is fuller than the group
                "proc/meminfo": "MemAvailable: 100 kB\n",
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.max": "8000000000\n",
                "sys/fs/cgroup/job/memory.current": "7000000000\n",
            },
            102_400,
            "MemAvailable in /proc/meminfo",
        ),
    ],
)
def test_room_is_the_tightest_limit_and_says_which(
    tmp_path: Path, files: dict[str, str], room: int | None, source: str
) -> None:
    root = machine(tmp_path, files)
    assert probe.memory_room(root) == (room, source)
    assert probe.available_memory(root) == room


def test_cores_and_nodes(tmp_path: Path) -> None:
    files = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 2},{n % 2 + 2}\n"
        for n in range(4)
    }
    files |= {f"sys/devices/system/node/node{n}/cpulist": "0\n" for n in range(3)}
    root = machine(tmp_path, files)
    assert probe.physical_cores(root) == 2
    for core, package in (("cpu0", "0"), ("cpu1", "1"), ("cpu2", "1")):
        folder = root / "sys/devices/system/cpu" / core / "topology"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
    assert probe.sockets(root) == 2
    assert probe.numa_nodes(root) == 3


@pytest.mark.parametrize(
    ("types", "units", "cmdline", "mode"),
    [
        (None, None, "", None),
        ([], [], "", "off"),
        ([], ["dmar0"], "", None),  # a unit without groups: a view that hides them
        (["DMA"], ["dmar0"], "", "translated"),
        (["identity", "DMA-FQ"], ["dmar0"], "iommu=pt", "translated"),
        (["identity", "identity"], ["dmar0"], "", "pass-through"),
        ([""], ["dmar0"], "quiet iommu=pt", "pass-through"),
        ([""], ["dmar0"], "quiet", None),
    ],
)
def test_iommu(
    tmp_path: Path,
    types: list[str] | None,
    units: list[str] | None,
    cmdline: str,
    mode: str | None,
) -> None:
    files = {"proc/cmdline": cmdline}
    for index, kind in enumerate(types or []):
        files[f"sys/kernel/iommu_groups/{index}/type"] = kind + "\n"
    machine(tmp_path, files)
    if types is not None:
        (tmp_path / "sys/kernel/iommu_groups").mkdir(parents=True, exist_ok=True)
    for unit in units or []:
        (tmp_path / "sys/class/iommu" / unit).mkdir(parents=True)
    if units is not None:
        (tmp_path / "sys/class/iommu").mkdir(parents=True, exist_ok=True)
    assert probe.iommu_mode(tmp_path) == mode


def fake_compiler(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_first_compiler_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.compiler() is None
    fake_compiler(tmp_path, "clang", "echo clang version 18.1; echo more")
    assert probe.compiler() == "clang: clang version 18.1"
    fake_compiler(tmp_path, "cc", "exit 1")
    assert probe.compiler() == "clang: clang version 18.1"
    monkeypatch.setenv("CC", "cc -m64")
    assert probe.compiler() is None  # the user's word: no other is tried
    monkeypatch.setenv("CC", "unbalanced '")
    assert probe.compiler() is None


def test_a_compiler_that_hangs_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "COMPILER_TIMEOUT_S", 0.2)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_compiler(tmp_path, "cc", "while :; do :; done")
    assert probe.compiler() is None


def test_a_group_without_a_limit_limits_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:memory:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory.max": "max\n",
    }
    assert probe.memory_limit(machine(tmp_path, files)) is None
