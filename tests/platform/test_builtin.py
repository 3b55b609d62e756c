"""The built-in platforms, host speed, fingerprints, versions, origins."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from fake_nvidia import view

from metainfer.core.records import RecordStore
from metainfer.platform import host_speed as speed_module
from metainfer.platform.cpu import CpuPlatform, cpu_facts
from metainfer.platform.cuda import CudaPlatform, cuda_facts
from metainfer.platform.facts import Facts, LinkFacts
from metainfer.platform.fingerprint import fingerprint
from metainfer.platform.host_speed import HostSpeed, host_speed, measure_host, with_host_speed
from metainfer.platform.origins import KINDS, Origins, origin
from metainfer.platform.probe_cuda import CudaProbe, probe_cuda
from metainfer.platform.probe_host import probe_host
from metainfer.platform.software import PACKAGES, versions


def cards() -> CudaProbe:
    return probe_cuda(lambda: (view(), ""), lambda: 1 / 0, Path("/none"))


def test_cpu_facts_describe_one_device() -> None:
    facts = CpuPlatform().facts()
    assert facts.platform == "cpu" and len(facts.devices) == 1
    assert facts.device.units == facts.host.usable_cores
    assert facts.device.memory_bytes == facts.host.memory_bytes
    assert facts.software["torch"] and facts.software["python"]


def test_cpu_dot_types_need_their_instructions() -> None:
    host = dataclasses.replace(probe_host(), cpu_features=frozenset({"avx2", "fma"}))
    assert cpu_facts(host, {}).device.dot_types == {"float32"}
    host = dataclasses.replace(host, cpu_features=frozenset({"amx_bf16", "avx512_vnni"}))
    assert cpu_facts(host, {}).device.dot_types == {"float32", "bfloat16", "int8"}
    host = dataclasses.replace(host, cpu_features=None)
    assert cpu_facts(host, {}).device.dot_types is None


def test_cpu_memory_is_the_containers(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "500000000\n",
        "sys/fs/cgroup/memory.current": "100000000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    state = CpuPlatform(tmp_path).memory()
    assert (state.free, state.total) == (400_000_000, 500_000_000)


def test_memory_of_an_unreadable_machine_is_none_to_give(tmp_path: Path) -> None:
    state = CpuPlatform(tmp_path).memory()
    assert (state.free, state.total) == (0, 0)


def test_cuda_facts_join_host_devices_and_versions() -> None:
    facts = cuda_facts(cards(), probe_host(), {"torch": "2.12"})
    assert facts.device.capability == (12, 0) and facts.host.usable_cores
    assert facts.software["torch"] == "2.12" and facts.software["cuda_driver"] == "13.0"
    assert "host.kernel" in facts.origins and "devices.0.units" in facts.origins


def test_cuda_without_a_device_says_why() -> None:
    verdict = CudaPlatform(lambda: CudaProbe(reason="libcuda.so.1 cannot be loaded")).detect()
    assert [reason.message for reason in verdict.reasons] == ["libcuda.so.1 cannot be loaded"]
    assert CudaPlatform(cards).detect().accepted


@pytest.mark.gpu
def test_cuda_streams_graphs_and_memory() -> None:
    torch = pytest.importorskip("torch")
    platform = CudaPlatform()
    platform.trim()  # what earlier tests left cached would serve the block
    before = platform.memory()
    block = torch.ones(64 << 20, device=platform.torch_device())
    assert before.free - platform.memory().free >= block.nbytes
    graph, other = platform.graph(), platform.graph()
    assert graph is not None and other is not None
    with graph.capture():
        doubled = block * 2
    with other.capture(graph.pool):
        tripled = block * 3
    block.fill_(2)
    graph.replay()
    other.replay()
    platform.synchronize()
    assert doubled[0].item() == 4 and tripled[0].item() == 6
    lane = platform.stream(priority=-1)
    assert lane is not None
    with lane:
        begin = lane.record()
        (block @ block if block.ndim == 2 else block.sum()).add_(1)
        end = lane.record()
    end.synchronize()
    assert 0 < end.seconds_since(begin) < 1
    with platform.guard(0):
        platform.trim()


# host speed


@pytest.fixture
def facts() -> Facts:
    return CpuPlatform().facts()


def test_a_measurement_is_plausible() -> None:
    speed = measure_host(2)
    assert 1e8 < speed.read_bytes_s < 1e13
    assert 1e8 < speed.float32_flops < 1e14
    assert speed.origin.startswith("measured: now")


def test_the_record_is_kept_and_used(
    facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def measure(cores: int) -> HostSpeed:
        calls.append(cores)
        return HostSpeed(1e10, 2e11, origin("measured", "now"))

    monkeypatch.setattr(speed_module, "measure_host", measure)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    store = RecordStore(tmp_path, fingerprint(facts))
    first, second = host_speed(facts, store), host_speed(facts, store)
    assert calls == [facts.host.usable_cores]
    assert (second.read_bytes_s, second.float32_flops) == (1e10, 2e11)
    assert "record" in second.origin and "record" not in first.origin
    filled = with_host_speed(facts, second)
    assert filled.device.read_bytes_s == filled.host.read_bytes_s == 1e10
    assert filled.device.dot_flops == {"float32": 2e11}
    assert filled.origins["devices.0.dot_flops.float32"] == second.origin


def test_b18_a_busy_machine_leaves_no_record(
    facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_module, "measure_host", lambda cores: HostSpeed(1.0, 1.0, "measured"))
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    store = RecordStore(tmp_path, fingerprint(facts))
    assert "busy" in host_speed(facts, store).origin
    assert store.get(speed_module.KIND, speed_module.KEY) is None


def test_without_measuring_it_is_a_labelled_seed(facts: Facts, tmp_path: Path) -> None:
    speed = host_speed(facts, RecordStore(tmp_path, fingerprint(facts)), measure=False)
    assert speed.origin.startswith("seed: ")
    assert not list(tmp_path.iterdir())


def test_known_speeds_are_not_overwritten(facts: Facts) -> None:
    own = dataclasses.replace(facts.device, read_bytes_s=5.0, dot_flops={"float32": 6.0})
    known = dataclasses.replace(facts, devices=(own,))
    filled = with_host_speed(known, HostSpeed(1.0, 2.0, "seed: x"))
    assert filled.device == own and filled.host.read_bytes_s == 1.0
    gpu = cuda_facts(cards(), probe_host(), {})
    filled = with_host_speed(gpu, HostSpeed(1.0, 2.0, "seed: x"))
    assert filled.devices == gpu.devices and filled.host.read_bytes_s == 1.0


# fingerprints


def test_b18_reordered_devices_are_another_machine() -> None:
    facts = cuda_facts(cards(), probe_host(), {})
    swapped = dataclasses.replace(facts, devices=facts.devices[::-1])
    assert fingerprint(facts).id != fingerprint(swapped).id
    assert fingerprint(facts).id == fingerprint(dataclasses.replace(facts)).id


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [
        ("power_cap_w", 250.0, False),
        ("uuid", "GPU-other", False),
        ("read_bytes_s", 1.0, True),  # a measured value is not part of the key
        ("name", "another", False),
    ],
)
def test_what_the_fingerprint_depends_on(field: str, value: object, same: bool) -> None:
    facts = cuda_facts(cards(), probe_host(), {})
    device = dataclasses.replace(facts.device, **{field: value})  # type: ignore[arg-type]
    changed = dataclasses.replace(facts, devices=(device, *facts.devices[1:]))
    assert (fingerprint(facts).id == fingerprint(changed).id) is same


def test_link_width_counts_and_idle_generation_does_not() -> None:
    facts = cuda_facts(cards(), probe_host(), {})

    def with_link(**fields: int) -> str:
        link = LinkFacts(source=-1, target=0, max_generation=5, **fields)
        return fingerprint(dataclasses.replace(facts, links=(link,))).id

    assert with_link(width=16, generation=5) == with_link(width=16, generation=1)
    assert with_link(width=16, generation=5) != with_link(width=8, generation=5)


def test_a_library_or_driver_update_is_another_machine() -> None:
    facts = cuda_facts(cards(), probe_host(), {"torch": "2.12", "rich": "1"})
    for name, same in (("torch", False), ("cuda_driver", False), ("rich", True)):
        other = dataclasses.replace(facts, software={**facts.software, name: "9"})
        assert (fingerprint(facts).id == fingerprint(other).id) is same


# versions and origins


def test_versions_name_every_package_and_absent_is_none() -> None:
    found = versions()
    assert set(found) == {"python", *PACKAGES}
    assert found["torch"] and found["numpy"]
    assert found["diffusers"] is None or isinstance(found["diffusers"], str)


def test_origins_have_a_vocabulary() -> None:
    notes = Origins()
    notes.note("b", "probed", "here")
    notes.merge({"x": "seed: y"}, "a.")
    assert notes.freeze() == {"a.x": "seed: y", "b": "probed: here"}
    with pytest.raises(ValueError, match="unknown origin kind"):
        notes.note("c", "guessed", "somewhere")
    assert "guessed" not in KINDS
