"""Machines for the checks, written down."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from metainfer.core.ledger import Loser
from metainfer.doctor.inputs import Disk, Inputs, Local
from metainfer.platform.facts import DeviceFacts, Facts, HostFacts, LinkFacts
from metainfer.platform.host_text import LSPCI, SMI_QUERY, HostText
from metainfer.platform.probe_host import HostProbe

SOFTWARE = {
    "python": "3.12.1",
    "torch": "2.12.0",
    "triton": "3.7.1",
    "nvidia_driver": "580.65",
    "cuda_driver": "13.0",
}
HOST = HostFacts(
    processor="Test Processor",
    usable_cores=32,
    memory_bytes=256 << 30,
    compiler="cc: cc 13",
    iommu="pass-through",
)


def card(**changes: object) -> DeviceFacts:
    fields: dict[str, object] = {
        "kind": "cuda",
        "name": "RTX 6000D",
        "capability": (12, 0),
        "units": 156,
        "memory_bytes": 84 << 30,
        "dot_types": frozenset({"bfloat16"}),
        "bus_id": "0000:41:00.0",
        "power_cap_w": 600.0,
        "power_default_w": 600.0,
        "bar_bytes": 128 << 30,
        "ecc": True,
    }
    return DeviceFacts(**{**fields, **changes})  # type: ignore[arg-type]


def link(index: int, **changes: object) -> LinkFacts:
    fields: dict[str, object] = {
        "source": -1,
        "target": index,
        "kind": "pcie",
        "generation": 5,
        "max_generation": 5,
        "width": 16,
        "max_width": 16,
    }
    return LinkFacts(**{**fields, **changes})  # type: ignore[arg-type]


def peer(i: int, j: int, **changes: object) -> LinkFacts:
    allowed = dict.fromkeys(("peer_read", "peer_write", "peer_atomics"), True)
    fields: dict[str, object] = {"source": i, "target": j, **allowed}
    return LinkFacts(**{**fields, **changes})  # type: ignore[arg-type]


def local(**changes: object) -> Local:
    fields: dict[str, object] = {
        "environ": {},
        "host": HostProbe(
            facts=HOST,
            cpu_features=frozenset(),
            available_bytes=200 << 30,
            machine_cores=32,
            machine_memory_bytes=256 << 30,
            origins={"host.usable_cores": "probed: affinity mask"},
        ),
        "disk": Disk(Path("/cache"), 100 << 30, True),
        "huge_pages": "always [madvise] never",
        "cmdline": "",
        "platform_losers": (),
    }
    return Local(**{**fields, **changes})  # type: ignore[arg-type]


def text_of(buses: tuple[str, ...]) -> HostText:
    """What a healthy host prints: each card below a root port of its own, all idle."""
    ports, gpus = [], []
    for number, bus in enumerate(buses):
        secondary = bus.split(":")[1]
        ports.append(
            f"0000:{number + 1:02x}:01.0 PCI bridge: Test (prog-if 00 [Normal decode])\n"
            f"\tBus: primary={number + 1:02x}, secondary={secondary}, subordinate={secondary}\n"
            "\tCapabilities: [70] Express (v2) Root Port (Slot+), IntMsgNum 0\n"
            "\t\tACSCtl:\tSrcValid+ ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl-\n\n"
            f"{bus} 3D controller: Test\n"
        )
        gpus.append(
            f"GPU 0000{bus}\n    Clocks Event Reasons\n        HW Slowdown : Not Active\n"
            "            HW Thermal Slowdown : Not Active\n"
            "    FB Memory Usage\n        Used : 4 MiB\n"
        )
    return HostText(
        {
            "/proc/sys/vm/overcommit_memory": "0\n",
            "/proc/1/cgroup": "0::/init.scope\n",
            LSPCI: "\n".join(ports),
            SMI_QUERY: f"Attached GPUs : {len(buses)}\n" + "".join(gpus),
        }
    )


def healthy(cards: int = 2) -> Inputs:
    """A CUDA machine with which nothing is wrong."""
    devices = tuple(card(bus_id=f"0000:{index + 0x41:02x}:00.0") for index in range(cards))
    links = [link(index) for index in range(cards)]
    links += [peer(i, j) for i in range(cards) for j in range(cards) if i != j]
    facts = Facts(
        platform="cuda", devices=devices, host=HOST, links=tuple(links), software=SOFTWARE
    )
    text = text_of(tuple(str(device.bus_id) for device in devices))
    return Inputs(facts=facts, local=local(), text=text)


def processor(**changes: object) -> Inputs:
    """A machine whose only device is its processor, with which nothing is wrong."""
    fields: dict[str, object] = {
        "kind": "cpu",
        "name": "Test Processor",
        "units": 32,
        "memory_bytes": 256 << 30,
        "features": frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        "dot_types": frozenset({"float32", "bfloat16"}),
    }
    device = DeviceFacts(**{**fields, **changes})  # type: ignore[arg-type]
    facts = Facts(platform="cpu", devices=(device,), host=HOST, software=SOFTWARE)
    return Inputs(facts=facts, local=local(), text=text_of(()))


def with_facts(inputs: Inputs, **changes: object) -> Inputs:
    return dataclasses.replace(inputs, facts=dataclasses.replace(inputs.facts, **changes))  # type: ignore[arg-type]


def with_local(inputs: Inputs, **changes: object) -> Inputs:
    return dataclasses.replace(inputs, local=local(**changes))


def with_software(inputs: Inputs, **versions: str | None) -> Inputs:
    return with_facts(inputs, software={**SOFTWARE, **versions})


def with_host(inputs: Inputs, **changes: object) -> Inputs:
    return with_facts(inputs, host=dataclasses.replace(HOST, **changes))  # type: ignore[arg-type]


def with_card(inputs: Inputs, **changes: object) -> Inputs:
    """The second card differs."""
    first, *rest = inputs.facts.devices
    return with_facts(inputs, devices=(first, *rest[:-1], dataclasses.replace(rest[-1], **changes)))  # type: ignore[arg-type]


def without_local(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, local=None, text=None)


def losing(name: str, *reasons: object) -> Loser:
    return Loser(name, reasons)  # type: ignore[arg-type]
