"""The CUDA probe on drivers that answer, answer partly, or do not exist."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_nvidia import ATTRIBUTES, BUS, DriverLibrary, Nvml, view

from metainfer.platform.capability import E2M1, E4M3, instructions
from metainfer.platform.cuda_driver import normal_bus_id, read_driver
from metainfer.platform.probe_cuda import CudaProbe, probe_cuda


def probe(nvml: object | None, root: Path = Path("/none"), **changes: int) -> CudaProbe:
    def load() -> object:
        if nvml is None:
            raise ImportError("no NVML")
        return nvml

    return probe_cuda(lambda: (view(**changes), ""), load, root)


def test_no_driver_and_no_nvml_is_no_device_with_a_reason() -> None:
    def no_nvml() -> object:
        raise ImportError

    found = probe_cuda(lambda: (None, "no driver"), no_nvml)
    assert found.devices == () and found.reason == "no driver"


def test_devices_come_from_the_driver() -> None:
    found = probe(None)
    first = found.devices[0]
    assert len(found.devices) == 2
    assert first.capability == (12, 0) and first.units == 156 and first.warp == 32
    assert first.shared_bytes_per_block == 101_376 and first.l2_bytes == 112 << 20
    assert first.read_bytes_s == pytest.approx(1.568e12)  # 2 x 14 GHz x 56 B
    assert first.ecc is True
    assert found.software == {"nvidia_driver": None, "cuda_driver": "13.0"}
    assert any("NVML" in note for note in found.notes)
    assert found.origins["devices.1.read_bytes_s"].startswith("derived: ")
    assert found.origins["devices.0.units"] == "probed: CUDA driver"


def test_what_nvml_alone_knows_is_unknown_without_it() -> None:
    found = probe(None)
    assert found.devices[0].power_cap_w is None and found.devices[0].bar_bytes is None
    host = found.links[0]
    assert (host.source, host.target) == (-1, 0)
    assert host.width is None and host.max_width is None


def test_nvml_is_matched_by_bus_id_not_by_index() -> None:
    # The fake NVML lists the cards in the opposite order.
    nvml = Nvml(
        {
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 300_000 + handle,
            "nvmlDeviceGetPowerManagementDefaultLimit": 600_000,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8 if handle == 0 else 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrPcieLinkGeneration": 4,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetBAR1MemoryInfo": SimpleNamespace(bar1Total=256 << 20),
            "nvmlSystemGetDriverVersion": b"580.65",
        }
    )
    found = probe(nvml)
    assert [d.power_cap_w for d in found.devices] == [300.001, 300.0]
    assert found.devices[0].power_default_w == 600.0
    assert found.devices[0].bar_bytes == 256 << 20
    assert [link.width for link in found.links[:2]] == [16, 8]
    assert found.links[0].generation == 4 and found.links[0].max_generation == 5
    assert found.software["nvidia_driver"] == "580.65"
    assert nvml.shut


@pytest.mark.parametrize(
    ("driver", "read", "expected"),
    [
        (True, 0, True),
        (True, 1, False),  # the chipset's veto
        (False, 0, False),  # the driver's veto
        (True, 6, True),  # NVML: unknown
    ],
)
def test_one_no_is_a_veto(driver: bool, read: int, expected: bool) -> None:
    nvml = Nvml({"nvmlDeviceGetP2PStatus": lambda a, b, index: read if index == 0 else 1})
    found = probe_cuda(lambda: (view(access=driver), ""), lambda: nvml, Path("/none"))
    peer = next(link for link in found.links if link.source == 0 and link.target == 1)
    assert peer.peer_read is expected
    assert peer.kind == "pcie" and peer.peer_atomics is False


def test_peer_write_is_not_peer_read() -> None:
    nvml = Nvml({"nvmlDeviceGetP2PStatus": lambda a, b, index: {0: 0, 1: 3}.get(index, 1)})
    found = probe(nvml)
    peer = next(link for link in found.links if link.source == 1)
    assert peer.peer_read is True and peer.peer_write is False


def test_nvml_alone_lists_devices() -> None:
    nvml = Nvml(
        {
            "nvmlDeviceGetName": "RTX 6000D",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=84 << 30),
            "nvmlDeviceGetCudaComputeCapability": (12, 0),
        }
    )
    found = probe_cuda(lambda: (None, "libcuda missing"), lambda: nvml, Path("/none"))
    assert [d.bus_id for d in found.devices] == [BUS[1], BUS[0]]
    first = found.devices[0]
    assert first.capability == (12, 0) and first.units is None
    assert first.shared_bytes_per_block is None and first.read_bytes_s is None
    assert "libcuda missing" in found.notes
    peer = next(link for link in found.links if link.source == 0)
    assert peer.peer_read is None  # nobody said so


def test_an_nvml_that_does_not_start_is_noted() -> None:
    class Broken(Nvml):
        def nvmlInit(self) -> None:
            raise RuntimeError("driver/library mismatch")

    assert "NVML does not start: driver/library mismatch" in probe(Broken()).notes


def test_numa_node(tmp_path: Path) -> None:
    for bus_id, node in zip(BUS, ("1", "-1"), strict=True):
        folder = tmp_path / "sys/bus/pci/devices" / bus_id
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node + "\n")
    assert [d.numa_node for d in probe(None, tmp_path).devices] == [1, None]


def test_driver_answers_are_read() -> None:
    seen, reason = read_driver(DriverLibrary(count=2))
    assert seen is not None and reason == ""
    assert seen.cuda_version == "12.9"
    first = seen.devices[0]
    assert first.name == "A Card" and first.bus_id == "0000:c1:00.0"
    assert first.memory_bytes == 96 << 30
    assert first.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert first.attributes["shared_bytes_per_block"] == 970
    assert set(first.attributes) == set(ATTRIBUTES)
    assert seen.access == {(0, 1): (True, False), (1, 0): (True, False)}


@pytest.mark.parametrize(
    ("fail", "reason"),
    [("cuInit", "CUDA error 999"), ("cuDeviceGetCount", "no device"), ("cuDeviceGet", "not open")],
)
def test_a_driver_that_fails_says_why(fail: str, reason: str) -> None:
    seen, why = read_driver(DriverLibrary(frozenset({fail})))
    assert seen is None and reason in why


def test_a_driver_that_answers_partly_leaves_unknowns() -> None:
    fail = frozenset({"cuDeviceGetAttribute", "cuDeviceGetUuid", "cuDeviceGetP2PAttribute"})
    seen, _ = read_driver(DriverLibrary(fail, count=2))
    assert seen is not None
    assert seen.devices[0].attributes == {} and seen.devices[0].uuid is None
    assert seen.access[0, 1] == (None, None)
    found = probe_cuda(lambda: (seen, ""), lambda: 1 / 0, Path("/none"))
    assert found.devices[0].capability is None and found.devices[0].dot_types is None


def test_an_old_driver_without_a_function_is_a_reason() -> None:
    class Old:
        def cuInit(self, flags: int) -> int:
            return 0

    seen, why = read_driver(Old())  # type: ignore[arg-type]
    assert seen is None and "does not answer as expected" in why


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:41:00.0", "0000:41:00.0"),
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("00010000:C1:00.0", "10000:c1:00.0"),
        ("41:00.0", None),
        ("", None),
        (None, None),
    ],
)
def test_bus_ids_compare(text: str | None, expected: str | None) -> None:
    assert normal_bus_id(text) == expected


def test_b01_instructions_follow_the_pair_not_the_family() -> None:
    consumer, data_centre = instructions((12, 0)), instructions((10, 0))
    hopper, ada, ampere = instructions((9, 0)), instructions((8, 9)), instructions((8, 0))
    assert consumer and data_centre and hopper and ada and ampere
    assert "tcgen05" in data_centre.features and "tcgen05" not in consumer.features
    assert "wgmma" in hopper.features
    assert not {"wgmma"} & (consumer.features | data_centre.features | ada.features)
    assert E4M3 in ada.dot_types and E4M3 not in ampere.dot_types | ampere.storage_types
    assert E2M1 in consumer.dot_types and E2M1 not in hopper.dot_types


@pytest.mark.parametrize("pair", [(9, 9), (11, 0), (13, 0), (6, 1)])
def test_b01_an_unlisted_capability_is_unknown(pair: tuple[int, int]) -> None:
    assert instructions(pair) is None
    found = probe(None, capability_major=pair[0], capability_minor=pair[1])
    assert found.devices[0].dot_types is None and found.devices[0].features is None


@pytest.mark.gpu
def test_a_real_card_is_read() -> None:
    torch = pytest.importorskip("torch")
    found = probe_cuda()
    assert len(found.devices) == torch.cuda.device_count()
    for index, device in enumerate(found.devices):
        known = torch.cuda.get_device_properties(index)
        assert device.name == known.name
        assert device.capability == (known.major, known.minor)
        assert device.units == known.multi_processor_count
        assert device.shared_bytes_per_block == known.shared_memory_per_block_optin
        assert device.memory_bytes == pytest.approx(known.total_memory, rel=0.02)
        assert device.power_cap_w and device.bus_id
