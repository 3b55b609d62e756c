"""What a machine is, as frozen data. ``None`` means unknown, and unknown is never "yes".

The core asks for facts and never names a device. Every fact can say where it came from
(`Facts.origins`, keyed by dotted path): probed, vendor's sheet, field report, derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNKNOWN = None

CPU = "cpu"
CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One compute device.

    `kind`: the device type as the framework names it (``cpu``, ``cuda``, a vendor's). `dot_types`:
    element types with native matrix instructions; `storage_types`: types it can load and store.
    `features`: named abilities (``avx512f``, ``wgmma``, ``tma``, ``graphs``, ``streams``).
    """

    kind: str
    name: str
    vendor: str = ""
    capability: tuple[int, int] | None = None
    units: int | None = None  # multiprocessors, or cores
    memory_bytes: int | None = None
    shared_bytes_per_block: int | None = None
    warp: int | None = None
    dot_types: frozenset[str] | None = None
    storage_types: frozenset[str] | None = None
    features: frozenset[str] | None = None
    l2_bytes: int | None = None
    read_bytes_s: float | None = None
    dot_flops: Mapping[str, float] = field(default_factory=dict)  # element type -> FLOP/s
    hardware_queues: int | None = None
    bus_id: str | None = None
    numa_node: int | None = None
    power_cap_w: float | None = None  # the limit in force
    power_default_w: float | None = None  # the limit the card ships with
    power_max_w: float | None = None  # the highest limit the card accepts
    switch: str | None = None  # name of the PCIe switch it hangs on, "" for a root port
    bar_bytes: int | None = None  # memory window seen by the bus
    ecc: bool | None = None
    uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The machine around the devices. Bytes and counts; ``None`` where it could not be read."""

    processor: str | None = None
    architecture: str | None = None
    physical_cores: int | None = None
    usable_cores: int | None = None  # after affinity and container limits
    memory_bytes: int | None = None
    numa_nodes: int | None = None
    sockets: int | None = None
    dma_bytes_s: float | None = None  # sum over all devices when all reach host memory at once
    read_bytes_s: float | None = None
    compiler: str | None = None  # C compiler with version
    iommu: str | None = None
    kernel: str | None = None
    price_hour: float | None = None  # of the whole machine, in its owner's currency


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One directed path between two ends (device indices, or -1 for host memory)."""

    source: int
    target: int
    kind: str | None = None  # pcie, nvlink, host
    generation: int | None = None  # as trained now; an idle card may train down
    width: int | None = None
    max_generation: int | None = None  # what both ends could do
    max_width: int | None = None
    bytes_s: float | None = None
    duplex_bytes_s: float | None = None  # both ways together, copy engines on pinned host memory
    kernel_bytes_s: float | None = None  # the same by kernels
    copy_us: float | None = None  # of a collective by copy engines through it, beside its bytes
    peer_read: bool | None = None
    peer_write: bool | None = None
    peer_atomics: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A whole machine. `software` maps package or library to version, None when absent."""

    platform: str
    devices: tuple[DeviceFacts, ...]
    host: HostFacts = field(default_factory=HostFacts)
    links: tuple[LinkFacts, ...] = ()
    software: Mapping[str, str | None] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> DeviceFacts:
        """The first device; all devices of a supported machine are alike."""
        return self.devices[0]
