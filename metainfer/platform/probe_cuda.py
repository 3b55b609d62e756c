"""Reads NVIDIA devices and their links from the driver and NVML. Never raises; unknown is None.

The CUDA driver gives the devices, in the order that torch uses. NVML adds what only it knows
(power, PCIe link, P2P by direction, ECC, memory window), matched by bus id. With NVML alone the
devices are still listed, in bus order; with neither, `CudaProbe.reason` says why.

The driver's peer flags are claims, not proof: a data test decides, elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from metainfer.platform.capability import instructions
from metainfer.platform.cuda_driver import DriverDevice, DriverView, normal_bus_id, read_driver
from metainfer.platform.facts import CUDA, DeviceFacts, LinkFacts
from metainfer.platform.origins import DERIVED, PROBED, Origins
from metainfer.platform.probe_host import read_text

HOST = -1
_P2P_READ, _P2P_WRITE, _P2P_NVLINK, _P2P_ATOMICS = 0, 1, 2, 3
_P2P_OK, _P2P_UNKNOWN = 0, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaProbe:
    """Devices, links, versions. `reason`: why there is no device; `notes`: what stayed unread."""

    devices: tuple[DeviceFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    software: Mapping[str, str | None] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Nvml:
    """An opened NVML and its handles by bus id."""

    api: Any
    handles: Mapping[str, Any]

    def ask(self, bus_id: str | None, name: str, *arguments: object) -> Any | None:
        """One query about one device; None when NVML or the device does not answer."""
        handle = self.handles.get(bus_id or "")
        if handle is None:
            return None
        return _quiet(lambda: getattr(self.api, name)(handle, *arguments))


def probe_cuda(
    driver: Callable[[], tuple[DriverView | None, str]] = read_driver,
    nvml: Callable[[], Any] | None = None,
    root: Path = Path("/"),
) -> CudaProbe:
    """Read everything once. `driver` and `nvml` are replaced by tests."""
    view, reason = driver()
    opened, nvml_note = _open_nvml(nvml or _import_nvml)
    try:
        listed = view.devices if view is not None else _listed_by(opened)
        if not listed:
            return CudaProbe(reason=reason or nvml_note or "no NVIDIA device")
        return _assemble(listed, view, opened, root, tuple(n for n in (reason, nvml_note) if n))
    finally:
        if opened is not None:
            _quiet(opened.api.nvmlShutdown)


def _assemble(
    listed: tuple[DriverDevice, ...],
    view: DriverView | None,
    nvml: _Nvml | None,
    root: Path,
    notes: tuple[str, ...],
) -> CudaProbe:
    origins = Origins()
    devices = []
    for index, found in enumerate(listed):
        device, own = _device(found, nvml, root)
        devices.append(device)
        origins.merge(own, f"devices.{index}.")
    links = [_host_link(index, device.bus_id, nvml) for index, device in enumerate(devices)]
    links += [
        _peer_link(i, j, devices, view, nvml)
        for i in range(len(devices))
        for j in range(len(devices))
        if i != j
    ]
    origins.note("links", PROBED, "NVML and the CUDA driver's flags; not a data test")
    version = None if nvml is None else _quiet(nvml.api.nvmlSystemGetDriverVersion)
    return CudaProbe(
        devices=tuple(devices),
        links=tuple(links),
        software={
            "nvidia_driver": None if version is None else _text(version),
            "cuda_driver": view.cuda_version if view is not None else None,
        },
        origins=origins.freeze(),
        notes=notes,
    )


def _device(
    found: DriverDevice, nvml: _Nvml | None, root: Path
) -> tuple[DeviceFacts, dict[str, str]]:
    have = found.attributes
    pair = (have.get("capability_major"), have.get("capability_minor"))
    capability = (pair[0], pair[1]) if pair[0] is not None and pair[1] is not None else None
    rules = instructions(capability) if capability else None
    clock, bits = have.get("memory_clock_khz"), have.get("bus_width_bits")
    peak = 2.0 * clock * 1e3 * bits / 8 if clock and bits else None
    bar = _ask(nvml, found.bus_id, "nvmlDeviceGetBAR1MemoryInfo")
    bar_total = None if bar is None else getattr(bar, "bar1Total", None)
    facts = DeviceFacts(
        kind=CUDA,
        name=found.name or "NVIDIA device",
        vendor="nvidia",
        capability=capability,
        units=have.get("units"),
        memory_bytes=found.memory_bytes,
        shared_bytes_per_block=have.get("shared_bytes_per_block"),
        warp=have.get("warp"),
        dot_types=rules.dot_types if rules else None,
        storage_types=rules.storage_types if rules else None,
        features=rules.features if rules else None,
        l2_bytes=have.get("l2_bytes"),
        read_bytes_s=peak,
        bus_id=found.bus_id,
        numa_node=_numa_node(root, found.bus_id),
        power_cap_w=_watts(_ask(nvml, found.bus_id, "nvmlDeviceGetEnforcedPowerLimit")),
        power_default_w=_watts(
            _ask(nvml, found.bus_id, "nvmlDeviceGetPowerManagementDefaultLimit")
        ),
        bar_bytes=bar_total if isinstance(bar_total, int) else None,
        ecc=None if "ecc" not in have else bool(have["ecc"]),
        uuid=found.uuid,
    )
    origins = Origins()
    for name in ("name", "capability", "units", "memory_bytes", "shared_bytes_per_block", "warp"):
        origins.note(name, PROBED, "CUDA driver" if have else "NVML")
    origins.note("vendor", PROBED, "an NVIDIA driver answers")
    for name in ("l2_bytes", "ecc", "bus_id", "uuid"):
        origins.note(name, PROBED, "CUDA driver" if have else "NVML")
    for name in ("dot_types", "storage_types", "features"):
        origins.note(name, DERIVED, "instruction set of the compute capability")
    origins.note("read_bytes_s", DERIVED, "2 x memory clock x bus width: a peak, not measured")
    for name in ("power_cap_w", "power_default_w", "bar_bytes"):
        origins.note(name, PROBED, "NVML")
    origins.note("numa_node", PROBED, "/sys/bus/pci/devices")
    return facts, origins.freeze()


def _host_link(index: int, bus_id: str | None, nvml: _Nvml | None) -> LinkFacts:
    def number(name: str) -> int | None:
        value = _ask(nvml, bus_id, name)
        return value if isinstance(value, int) and value > 0 else None

    return LinkFacts(
        source=HOST,
        target=index,
        kind="pcie",
        generation=number("nvmlDeviceGetCurrPcieLinkGeneration"),
        width=number("nvmlDeviceGetCurrPcieLinkWidth"),
        max_generation=number("nvmlDeviceGetMaxPcieLinkGeneration"),
        max_width=number("nvmlDeviceGetMaxPcieLinkWidth"),
    )


def _peer_link(
    i: int,
    j: int,
    devices: list[DeviceFacts],
    view: DriverView | None,
    nvml: _Nvml | None,
) -> LinkFacts:
    """Read and write as both sources say; one "no" wins, since either can veto."""
    can, atomics = view.access[i, j] if view is not None else (None, None)
    target = None if nvml is None else nvml.handles.get(devices[j].bus_id or "")

    def status(index: int) -> bool | None:
        if target is None:
            return None
        value = _ask(nvml, devices[i].bus_id, "nvmlDeviceGetP2PStatus", target, index)
        return None if value is None or value == _P2P_UNKNOWN else value == _P2P_OK

    nvlink = status(_P2P_NVLINK)
    return LinkFacts(
        source=i,
        target=j,
        kind=None if nvlink is None else ("nvlink" if nvlink else "pcie"),
        peer_read=_both(can, status(_P2P_READ)),
        peer_write=_both(can, status(_P2P_WRITE)),
        peer_atomics=_both(atomics, status(_P2P_ATOMICS)),
    )


def _both(first: bool | None, second: bool | None) -> bool | None:
    known = [answer for answer in (first, second) if answer is not None]
    return all(known) if known else None


def _import_nvml() -> Any:
    import pynvml

    return pynvml


def _open_nvml(load: Callable[[], Any]) -> tuple[_Nvml | None, str]:
    api = _quiet(load)
    if api is None:
        return None, "NVML's Python binding is not installed: power, link and P2P stay unknown"
    try:
        api.nvmlInit()
    except Exception as error:  # noqa: BLE001  a foreign library; probing never raises
        return None, f"NVML does not start: {error}"
    handles: dict[str, Any] = {}
    for index in range(_quiet(api.nvmlDeviceGetCount) or 0):
        handle = _quiet(partial(api.nvmlDeviceGetHandleByIndex, index))
        info = None if handle is None else _quiet(partial(api.nvmlDeviceGetPciInfo, handle))
        bus_id = None if info is None else normal_bus_id(_text(info.busId))
        if bus_id is not None:
            handles[bus_id] = handle
    return _Nvml(api, handles), ""


def _listed_by(nvml: _Nvml | None) -> tuple[DriverDevice, ...]:
    """Devices as NVML lists them, for a machine whose driver library does not load."""
    if nvml is None:
        return ()
    found = []
    for bus_id in nvml.handles:
        memory = nvml.ask(bus_id, "nvmlDeviceGetMemoryInfo")
        pair = nvml.ask(bus_id, "nvmlDeviceGetCudaComputeCapability")
        name, own = nvml.ask(bus_id, "nvmlDeviceGetName"), nvml.ask(bus_id, "nvmlDeviceGetUUID")
        have = {} if pair is None else {"capability_major": pair[0], "capability_minor": pair[1]}
        found.append(
            DriverDevice(
                None if name is None else _text(name),
                bus_id,
                None if own is None else _text(own),
                None if memory is None else int(memory.total),
                have,
            )
        )
    return tuple(found)


def _ask(nvml: _Nvml | None, bus_id: str | None, name: str, *arguments: object) -> Any | None:
    return None if nvml is None else nvml.ask(bus_id, name, *arguments)


def _quiet(call: Callable[[], Any]) -> Any | None:
    """The call's value; None when the foreign library raises anything."""
    try:
        return call()
    except Exception:  # noqa: BLE001  a foreign library; probing never raises
        return None


def _watts(milliwatts: Any | None) -> float | None:
    return milliwatts / 1000.0 if isinstance(milliwatts, int) and milliwatts > 0 else None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _numa_node(root: Path, bus_id: str | None) -> int | None:
    text = None if bus_id is None else read_text(root / f"sys/bus/pci/devices/{bus_id}/numa_node")
    try:
        node = int((text or "").strip())
    except ValueError:
        return None
    return node if node >= 0 else None
